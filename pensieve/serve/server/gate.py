"""Who comes in: before any route, the key, the host, and whether the engine is warm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pensieve.errors import PensieveError
from pensieve.serve.server.refusals import NoKey, NotReady, NotThisWay, refused

if TYPE_CHECKING:
    from pensieve.serve.server.app import App

OPEN = ("/health", "/")  # without a key


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
        except PensieveError as error:
            await refused(scope, error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> None:
        """Note the tenant. Raises NoKey, NotThisWay, NotReady."""
        state, headers, path = self._state, Headers(scope=scope), scope["path"]
        key = headers.get("authorization", "").removeprefix("Bearer ").strip() or headers.get("x-api-key", "")
        tenant = scope["pensieve.tenant"] = state.tenants.of(key)
        if tenant is None and path not in OPEN:
            raise NoKey("The API key is missing or wrong; send it as Authorization: Bearer KEY.")
        if not state.tenants.required and not _local(headers.get("host", "")):
            raise NotThisWay("Without API keys this server answers to 127.0.0.1 and localhost only.")
        if state.server is None and path not in OPEN:
            raise NotReady(state.failure or "The engine is still loading.")


def _local(host: str) -> bool:
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    return name in ("127.0.0.1", "localhost", "[::1]", "")
