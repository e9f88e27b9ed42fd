"""Completions and chat completions as OpenAI's clients read them: JSON, whole or in chunks of a stream."""

from __future__ import annotations

import json
import random
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, ClassVar

from pensieve.serve.server.schemas import ChatBody, CompletionBody, finish_reason, usage

if TYPE_CHECKING:
    from pensieve.serve.server.feed import Feed


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
