"""Who comes in and with what: the key, the host, the body of a request; and which status and sentence a refusal becomes."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
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
    503: ("server_error", "loading", {"Retry-After": "2"}),
}
"""Kind, code and headers of what the server answers before it asks its engine, by status."""

_ANSWERS: dict[type[PensieveError], tuple[int, str, str | None]] = {
    ContextLengthError: (400, "invalid_request_error", "context_length_exceeded"),
    CapacityError: (400, "invalid_request_error", "capacity_exceeded"),
    RequestRefused: (400, "invalid_request_error", None),
    ConfigError: (400, "invalid_request_error", None),
    PensieveError: (503, "server_error", None),
}
"""Status, kind and code; of the first that an error is."""


class BadBody(PensieveError):
    """The body of a request is none that its path takes. where: the field."""

    def __init__(self, sentence: str, where: str | None = None) -> None:
        super().__init__(sentence)
        self.where = where


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refused(_: object, error: Exception) -> Response:
    if isinstance(error, TooManySessions):
        error = HTTPException(429, str(error))
    if isinstance(error, HTTPException):
        kind, code, headers = _KINDS.get(error.status_code, ("invalid_request_error", None, {}))
        return JSONResponse(error_body(error.detail, kind, code), status_code=error.status_code, headers=headers)
    if isinstance(error, BadBody):
        body = error_body(str(error), "invalid_request_error", "invalid", error.where)
        return JSONResponse(body, status_code=400)
    status, kind, code = next(answer for known, answer in _ANSWERS.items() if isinstance(error, known))
    return JSONResponse(error_body(str(error), kind, code), status_code=status)


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
