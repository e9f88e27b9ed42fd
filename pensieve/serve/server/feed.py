"""One turn as its client gets it: pieces of text, completions and chat completions, whole or in server-sent events."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, ClassVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from pensieve.core.request import Event
from pensieve.errors import PensieveError
from pensieve.serve.server.gate import CLOSED
from pensieve.serve.server.schemas import ChatBody, CompletionBody, error_body, finish_reason, usage
from pensieve.serve.server.turn import Generation, TextStream, Turn


class CompletionShape:
    """JSON of a completion, whole and in chunks."""

    kind, chunk_kind = "text_completion", "text_completion"
    _opening: ClassVar[dict[str, Any]] = {}
    _end: ClassVar[dict[str, Any]] = {"text": ""}

    def __init__(self, prefix: str, model: str, body: ChatBody | CompletionBody) -> None:
        self._id = f"{prefix}-{random.getrandbits(96):024x}"
        self._model, self._created, self._counts = model, int(time.time()), body.include_usage
        self.tells_ids = isinstance(body, CompletionBody) and bool(body.return_token_ids)

    def _frame(self, kind: str, feed: Feed, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "session_id": feed.turn.conversation.id,
            "choices": choices,
        }

    def whole(self, text: str, feed: Feed) -> dict[str, Any]:
        record = feed.turn.record
        assert record is not None
        choice = {"index": 0, **self._said(text), "logprobs": None, "finish_reason": finish_reason(record)}
        if self.tells_ids:
            choice["token_ids"] = list(record.token_ids)
        return {**self._frame(self.kind, feed, [choice]), "usage": usage(record)}

    async def events(self, feed: Feed) -> AsyncGenerator[str, None]:
        """The chunks of a stream."""
        async with aclosing(feed.pieces()) as pieces:
            first = await anext(pieces, "")  # before anything is sent: what is refused gets a status that says so
            if self._opening:
                yield self._chunk(feed, self._opening)
            if first or self.tells_ids:
                yield self._chunk(feed, self._delta(first))
            async for piece in pieces:
                yield self._chunk(feed, self._delta(piece))
        record = feed.turn.record
        assert record is not None
        yield self._chunk(feed, self._end, finish_reason(record))
        if self._counts:
            yield sse_data({**self._frame(self.chunk_kind, feed, []), "usage": usage(record)})
        yield "data: [DONE]\n\n"

    def _chunk(self, feed: Feed, said: dict[str, Any], finish: str | None = None) -> str:
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish}
        if self.tells_ids:
            choice["token_ids"] = feed.take_ids()
        return sse_data(self._frame(self.chunk_kind, feed, [choice]))

    def _said(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _delta(self, piece: str) -> dict[str, Any]:
        return {"text": piece}


class ChatShape(CompletionShape):
    """The same of a chat completion."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    _opening, _end = {"delta": {"role": "assistant", "content": ""}}, {"delta": {}}

    def _said(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None, "annotations": []}}

    def _delta(self, piece: str) -> dict[str, Any]:
        return {"delta": {"content": piece}}


def sse_data(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


class ClientLeft(HTTPException):
    """Nobody is there to get what the turn would still say."""

    def __init__(self) -> None:
        super().__init__(CLOSED)


class Feed:
    """One turn in the event loop: its text pieces as they come, or its whole text.

    tells_ids: a piece for each token, with its text if that is decided; take_ids gives its ids.
    """

    def __init__(self, turn: Turn, streams: bool, tells_ids: bool = False) -> None:
        """turn: that has not begun. streams: `pieces` is wanted; else `whole`."""
        self.turn = turn
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()  # None: the end
        self._text = TextStream(turn.server.tokenizer.decode, turn.stops)
        self.tells_ids = tells_ids
        self._ids: list[int] = []
        self._left = False
        turn.on_event, turn.on_end = self.on_event if streams else None, self.on_end

    def on_event(self, event: Event) -> None:
        """Queue an event for the loop; called in the engine's thread, as on_end is."""
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def on_end(self) -> None:
        self._loop.call_soon_threadsafe(self._events.put_nowait, None)

    def drive(self) -> None:
        """Let time go on for its turn, which has begun, on a simulated machine."""
        if self.turn.server.system.clock.virtual:
            self._loop.run_in_executor(None, self.turn.server.drive, self.turn.future)

    async def pieces(self) -> AsyncGenerator[str, None]:
        """Its text. Raises what the turn ended with, or ClientLeft."""
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
            self.turn.cancel()


class _EventStream(StreamingResponse):
    """Starlette's sends from a task beside one that waits for the client to leave, which takes several rounds of the loop
    before the first byte; here the feed knows when its client leaves."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.stream_response(send)
