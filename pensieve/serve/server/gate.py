"""Who comes in and with what: the key, the host, the body of a request; and which status and sentence a refusal becomes."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import ipaddress
import os
import re
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import request_response
from starlette.types import ASGIApp, Receive, Scope, Send

from pensieve.errors import (
    CapacityError,
    ConfigError,
    ContextLengthError,
    PensieveError,
    RequestRefused,
    TooManySessions,
)

if TYPE_CHECKING:
    from pensieve.serve.server.app import App

KEYS = "PENSIEVE_API_KEYS"
"""The environment variable with the clients' keys."""
OPERATOR = "operator"
"""The tenant that may read /metrics, where there are several."""
OPEN = ("/health", "/")  # without a key
SESSION_HEADER = "X-Session-Id"
CLOSED = 499  # as nginx logs it; nobody receives it
_INLINE_BYTES = 16_384
T = TypeVar("T")

_KINDS: dict[int, tuple[str, str | None, dict[str, str]]] = {
    401: ("authentication_error", None, {"WWW-Authenticate": "Bearer"}),
    403: ("permission_error", None, {}),
    404: ("not_found_error", "not_found", {}),
    413: ("invalid_request_error", None, {"Connection": "close"}),
    429: ("rate_limit_error", "overloaded", {"Retry-After": "1"}),
    503: ("server_error", None, {"Retry-After": "2"}),
}
"""Kind, code and headers of an error by its status."""


class BadBody(ConfigError):
    """The body of a request is none that its path takes. where: the field."""

    def __init__(self, sentence: str, where: str | None = None) -> None:
        super().__init__(sentence)
        self.where = where


_ANSWERS: dict[type[PensieveError], tuple[int, str | None]] = {
    BadBody: (400, "invalid"),
    ContextLengthError: (400, "context_length_exceeded"),
    CapacityError: (400, "capacity_exceeded"),
    TooManySessions: (429, None),
    RequestRefused: (400, None),
    ConfigError: (400, None),
    PensieveError: (503, None),
}
"""Status, and a code of its own; of the first that an error is."""


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refused(_: object, error: Exception) -> Response:
    """Answer with the status and the sentence of an error."""
    if isinstance(error, HTTPException):
        status, own, sentence = error.status_code, None, str(error.detail)
    else:
        sentence = str(error)
        status, own = next(answer for known, answer in _ANSWERS.items() if isinstance(error, known))
    kind, code, headers = _KINDS.get(status, ("invalid_request_error", None, {}))
    body = error_body(sentence, kind, own or code, error.where if isinstance(error, BadBody) else None)
    return JSONResponse(body, status_code=status, headers=headers)


class Tenants:
    """Whose key it is. Without keys there is one tenant, and no key is asked for."""

    def __init__(self, keys: Mapping[str, str] | None = None) -> None:
        """keys: tenant by key."""
        self._tenants = {_digest(key): tenant for key, tenant in (keys or {}).items()}

    @property
    def required(self) -> bool:
        return bool(self._tenants)

    def of(self, key: str) -> str | None:
        """The tenant; None: nobody's key. Digests are compared, so the time it takes says nothing of a key."""
        return self._tenants.get(_digest(key)) if self._tenants else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def tenants_of(host: str) -> Tenants:
    """From the environment: `tenant:key` with commas between. Raises ConfigError where an address beyond this machine would
    be served without keys."""
    keys: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in os.environ.get(KEYS, "").split(","))):
        tenant, _, key = entry.partition(":")
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", tenant) or len(key) < 8:
            raise ConfigError(
                f"{KEYS} holds an entry that is no tenant:key. A tenant has letters, digits, - and _; a key has "
                "at least 8 characters (for example: openssl rand -hex 16)."
            )
        if key in keys:
            raise ConfigError(f"{KEYS} gives the same key to {keys[key]} and {tenant}.")
        keys[key] = tenant
    if not keys and not _loopback(host):
        raise ConfigError(
            f"serve.host={host} can be reached from other machines, so clients need a key: "
            f"export {KEYS}=alice:$(openssl rand -hex 16), or leave serve.host=127.0.0.1."
        )
    return Tenants(keys)


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Gate:
    """Before any route: whose key it is, from where, and whether the engine is warm.

    Without keys only this machine is served, and a page from elsewhere that gives its own name to this address is not.
    """

    def __init__(self, app: ASGIApp, state: App) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http":
                self._admit(scope)
        except HTTPException as error:
            await refused(scope, error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> None:
        """Note the tenant. Raises HTTPException."""
        state, headers, path = self._state, Headers(scope=scope), scope["path"]
        key = headers.get("authorization", "").removeprefix("Bearer ").strip() or headers.get("x-api-key", "")
        tenant = scope["pensieve.tenant"] = state.tenants.of(key)
        if tenant is None and path not in OPEN:
            raise HTTPException(401, "The API key is missing or wrong; send it as Authorization: Bearer KEY.")
        if not state.tenants.required and not _local(headers.get("host", "")):
            raise HTTPException(403, "Without API keys this server answers to 127.0.0.1 and localhost only.")
        if state.server is None and path not in OPEN:
            raise HTTPException(503, state.failure or "The engine is still loading.")


def _local(host: str) -> bool:
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    return name in ("127.0.0.1", "localhost", "[::1]", "")


class BodyRoute(APIRoute):
    """Its endpoint takes `request`, `body` (a pydantic model) and, where it names it, `x_session_id`. The document describes
    it as any other route; FastAPI's way from a request to its arguments, with two exit stacks and a resolution of
    dependencies, would cost a third of the CPU time that passes before a turn begins."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **fields: Any) -> None:
        super().__init__(path, endpoint, **fields)
        self.app = request_response(self.get_route_handler())

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint: Callable[..., Coroutine[Any, Any, Response]] = self.endpoint
        model: type[BaseModel] = get_type_hints(endpoint)["body"]
        named = "x_session_id" in inspect.signature(endpoint).parameters

        async def handle(request: Request) -> Response:
            sent, kind = await _whole(request), request.headers.get("content-type", "")
            body = await off_the_loop(request, partial(read_body, model, sent, kind))
            return await (
                endpoint(request, body, request.headers.get(SESSION_HEADER)) if named else endpoint(request, body)
            )

        return handle


async def _whole(request: Request) -> bytes:
    """The body. Raises HTTPException where it is larger than a client may send, or its client leaves before its end."""
    settings, sent = request.app.state.settings, bytearray()
    try:
        async for part in request.stream():
            sent += part
            if len(sent) > settings.max_body_bytes:
                raise HTTPException(413, f"The body is larger than {settings.max_body_bytes} bytes.")
    except ClientDisconnect:
        raise HTTPException(CLOSED) from None
    request.scope["pensieve.body_bytes"] = len(sent)
    return bytes(sent)


async def off_the_loop(request: Request, call: Callable[[], T]) -> T:
    """What `call` makes of a request's body; of a long one in another thread, so that other clients do not wait."""
    if int(request.scope["pensieve.body_bytes"]) < _INLINE_BYTES:
        return call()
    return await asyncio.to_thread(call)


def read_body(model: type[BaseModel], sent: bytes, content_type: str) -> BaseModel:
    """Raises BadBody: also for a body of another type, which a page from elsewhere may send unasked. It tells the first thing
    that is wrong, without what was sent: that may be anything."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise BadBody("The body is JSON; send it as Content-Type: application/json.")
    try:
        return model.model_validate(from_json(sent, allow_inf_nan=False))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        sentence = f"{where}: {first['msg']}" if where else first["msg"]
        raise BadBody(sentence.encode("utf-8", "replace").decode(), where or None) from None
    except ValueError as error:
        raise BadBody(f"The body is no JSON: {error}.") from None
