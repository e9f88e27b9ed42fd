"""Who comes in: before any route, the key, the host, the size of the body, and whether the engine is warm."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from fastapi import Response
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pensieve.serve.server.schemas import error_body

if TYPE_CHECKING:
    from pensieve.serve.server.app import App

OPEN = ("/health", "/")  # without a key


class Gate:
    """Before any route: whose key it is, from where, how large, and whether the engine is warm.

    Without keys only this machine is served, and a page from elsewhere that gives its own name to this address is not.
    """

    def __init__(self, app: ASGIApp, state: App) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        refusal = self._refusal(scope["path"], headers, scope)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        limit = self._state.settings.max_body_bytes
        length = headers.get("content-length", "")
        too_large = length.isdigit() and int(length) > limit
        body = None if too_large else await _read(receive, limit)
        if body is None:
            said = error_body(f"The body is larger than {limit} bytes.", "invalid_request_error", "too_large")
            await JSONResponse(said, status_code=413, headers={"Connection": "close"})(scope, receive, send)
            return
        scope["pensieve.body_bytes"] = len(body)
        await self._app(scope, _replay(body, receive), send)

    def _refusal(self, path: str, headers: dict[str, str], scope: Scope) -> Response | None:
        state = self._state
        key = headers.get("authorization", "").removeprefix("Bearer ").strip() or headers.get("x-api-key", "")
        tenant = state.tenants.of(key)
        scope["pensieve.tenant"] = tenant
        if tenant is None and path not in OPEN:
            said = error_body(
                "The API key is missing or wrong; send it as Authorization: Bearer KEY.", "authentication_error"
            )
            return JSONResponse(said, status_code=401, headers={"WWW-Authenticate": "Bearer"})
        if not state.tenants.required and not _local(headers.get("host", "")):
            said = error_body(
                "Without API keys this server answers to 127.0.0.1 and localhost only.", "permission_error"
            )
            return JSONResponse(said, status_code=403)
        if state.server is None and path not in OPEN:
            said = error_body(state.failure or "The engine is still loading.", "server_error", "loading")
            return JSONResponse(said, status_code=503, headers={"Retry-After": "2"})
        return None


def _local(host: str) -> bool:
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    return name in ("127.0.0.1", "localhost", "[::1]", "")


async def _read(receive: Receive, limit: int) -> bytes | None:
    """Read the whole body; None where it is larger than `limit`, or its client left before its end."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            return None
        if not message.get("more_body"):
            return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Make a `receive` that gives the body in one piece, then whatever comes."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    def again() -> Awaitable[Message]:
        if first:
            done: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
            done.set_result(first.pop())
            return done
        return receive()

    return again
