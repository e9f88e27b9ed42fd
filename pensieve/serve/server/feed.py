"""One turn as its client gets it, whole or in server-sent events; a client that leaves ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from pensieve.core.event import Event
from pensieve.errors import PensieveError
from pensieve.serve.server.api import Server
from pensieve.serve.server.body_route import CLOSED
from pensieve.serve.server.completions import sse_data
from pensieve.serve.server.schemas import error_body
from pensieve.serve.server.text import TextStream
from pensieve.serve.server.turn import Generation, Turn


class ClientLeft(HTTPException):
    """Nobody is there to get what the turn would still say."""

    def __init__(self) -> None:
        super().__init__(CLOSED)


class Feed:
    """One turn in the event loop: its text pieces as they come, or its whole text.

    tells_ids: a piece for each token, with its text if that is decided; take_ids gives its ids.
    """

    def __init__(self, server: Server, stops: tuple[str, ...], tells_ids: bool = False) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()  # None: the end
        self._text = TextStream(server.tokenizer.decode, stops)
        self.tells_ids = tells_ids
        self._ids: list[int] = []
        self._left = False
        self.turn: Turn

    def on_event(self, event: Event) -> None:
        """Queue an event for the loop; called in the engine's thread, as on_end is."""
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def on_end(self) -> None:
        self._loop.call_soon_threadsafe(self._events.put_nowait, None)

    def started(self, turn: Turn) -> None:
        """Follow this turn, which has begun and whose `on_end` is this feed's."""
        self.turn = turn
        if self._server.system.clock.virtual:
            self._loop.run_in_executor(None, self._server.drive, turn.future)

    async def pieces(self) -> AsyncGenerator[str, None]:
        """Of a turn whose `on_event` is this one's. Raises what the turn ended with, or ClientLeft."""
        try:
            while (event := await self._events.get()) is not None:
                if event.token is None:
                    continue
                self._ids.append(event.token)
                piece = self._text.push(event.token)
                if piece or self.tells_ids:
                    yield piece
            self._result()
            rest = self._text.finish()
            if rest:
                yield rest
        finally:
            self._end()

    def take_ids(self) -> list[int]:
        """Return the ids of the tokens that came since the last call."""
        ids, self._ids = self._ids, []
        return ids

    async def whole(self, request: Request) -> str:
        """Wait for the end of the turn and return its text. Raises what the turn ended with, or ClientLeft."""
        watch = asyncio.ensure_future(self._watch(request.receive))
        try:
            while await self._events.get() is not None:
                pass
            return self._result().text
        finally:
            watch.cancel()
            self._end()

    async def sent(
        self, request: Request, events: AsyncGenerator[str, None], headers: dict[str, str]
    ) -> StreamingResponse:
        """Make the response that streams these events. Raises what ends the turn before the first of them."""
        watch = asyncio.ensure_future(self._watch(request.receive))
        try:
            first = await anext(events)
        except BaseException:
            watch.cancel()
            raise

        async def all_events() -> AsyncIterator[str]:
            try:
                async with aclosing(events):
                    yield first
                    async for text in events:
                        yield text
            except PensieveError as error:  # after the first byte: the status has been sent
                yield sse_data(error_body(str(error), "server_error"))
            except ClientLeft:
                pass
            finally:
                watch.cancel()

        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers}
        return _EventStream(all_events(), media_type="text/event-stream", headers=headers)

    def _result(self) -> Generation:
        if self._left:
            raise ClientLeft
        return self.turn.future.result()

    async def _watch(self, receive: Receive) -> None:
        """End the turn when its client leaves, and so whatever waits for it."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._left = True
        self._end()

    def _end(self) -> None:
        """Cancel the turn, unless it has ended."""
        if not self.turn.future.done():
            self._server.cancel_turn(self.turn)


class _EventStream(StreamingResponse):
    """Starlette's sends from a task beside one that waits for the client to leave, which takes several rounds of the loop
    before the first byte; here the feed knows when its client leaves."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.stream_response(send)
