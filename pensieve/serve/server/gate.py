"""Who comes in and with what: the key, the host, the length of a body; and which status and sentence a refusal becomes."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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

_KINDS: dict[int, tuple[str, str | None, dict[str, str]]] = {
    401: ("authentication_error", None, {"WWW-Authenticate": "Bearer"}),
    403: ("permission_error", None, {}),
    404: ("not_found_error", "not_found", {}),
    413: ("invalid_request_error", None, {"Connection": "close"}),
    429: ("rate_limit_error", "overloaded", {"Retry-After": "1"}),
    503: ("server_error", None, {"Retry-After": "2"}),
}
"""Kind, code and headers of an error by its status."""

_ANSWERS: dict[type[PensieveError], tuple[int, str | None]] = {
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
    """Answer with the status and the sentence of an error. Of a body it tells one thing that is wrong, the deepest, without
    what was sent: that may be anything."""
    status, own, where, sentence = 400, None, None, str(error)
    if isinstance(error, RequestValidationError):
        first = max(error.errors(), key=lambda one: len(one["loc"]))
        where = ".".join(map(str, first["loc"][1:])) or None
        sentence = f"{where or 'The body, which is sent as Content-Type: application/json'}: {first['msg']}"
    elif isinstance(error, HTTPException):
        status, sentence = error.status_code, str(error.detail)
    else:
        status, own = next(answer for known, answer in _ANSWERS.items() if isinstance(error, known))
    kind, code, headers = _KINDS.get(status, ("invalid_request_error", None, {}))
    return JSONResponse(error_body(sentence, kind, own or code, where), status_code=status, headers=headers)


def digest(key: str) -> bytes:
    """What keys are compared by: the time it takes says nothing of a key."""
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def tenants_of(host: str) -> dict[str, str]:
    """Tenants by key, from the environment: `tenant:key` with commas between. Raises ConfigError where an address beyond this
    machine would be served without keys."""
    keys: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in os.environ.get(KEYS, "").split(","))):
        tenant, _, key = entry.partition(":")
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", tenant) or len(key) < 8 or key in keys:
            raise ConfigError(
                f"{KEYS} holds an entry that is no tenant:key. A tenant has letters, digits, - and _; a key has at least 8 "
                "characters (for example: openssl rand -hex 16), and is of one tenant."
            )
        keys[key] = tenant
    if not keys and not _loopback(host):
        raise ConfigError(
            f"serve.host={host} can be reached from other machines, so clients need a key: "
            f"export {KEYS}=alice:$(openssl rand -hex 16), or leave serve.host=127.0.0.1."
        )
    return keys


def _loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Gate:
    """Before any route: whose key it is, from where, whether the engine is warm, and how long a body may be.

    Without keys only this machine is served, and a page from elsewhere that gives its own name to this address is not.
    """

    def __init__(self, app: ASGIApp, state: App) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._admit(scope)
        except HTTPException as error:
            await refused(scope, error)(scope, receive, send)
            return
        most, sent = self._state.settings.max_body_bytes, 0

        async def limited() -> Message:
            nonlocal sent
            message = await receive()
            sent += len(message.get("body", b""))
            if sent > most:
                raise HTTPException(413, f"The body is larger than {most} bytes.")
            return message

        await self._app(scope, limited, send)

    def _admit(self, scope: Scope) -> None:
        """Note the tenant. Raises HTTPException."""
        state, headers, path = self._state, Headers(scope=scope), scope["path"]
        key = headers.get("authorization", "").removeprefix("Bearer ").strip() or headers.get("x-api-key", "")
        tenant = scope["pensieve.tenant"] = state.tenants.get(digest(key)) if state.tenants else ""
        if tenant is None and path not in OPEN:
            raise HTTPException(401, "The API key is missing or wrong; send it as Authorization: Bearer KEY.")
        host = headers.get("host", "")
        name, _, port = host.rpartition(":")
        if not state.tenants and host and not _loopback(name if port.isdigit() else host):
            raise HTTPException(403, "Without API keys this server answers to 127.0.0.1 and localhost only.")
        if state.server is None and path not in OPEN:
            raise HTTPException(503, state.failure or "The engine is still loading.")


class StrictRoute(APIRoute):
    """Of JSON that can be sent back: no number without a form in JSON, and no half of a character."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handle(_Strict(request.scope, request.receive))

        return strict


class _Strict(Request):
    async def json(self) -> Any:
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise HTTPException(400, f"The body is no JSON: {error}.") from None
