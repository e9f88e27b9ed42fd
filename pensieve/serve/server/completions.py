"""Completions and chat completions as OpenAI's clients read them: JSON, whole or in chunks of a stream."""

from __future__ import annotations

import json
import random
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from pensieve.serve.server.schemas import finish_reason, usage

if TYPE_CHECKING:
    from pensieve.serve.server.feed import Feed


class CompletionShape:
    """JSON of a completion, whole and in chunks."""

    kind, chunk_kind = "text_completion", "text_completion"

    def __init__(self, prefix: str, model: str) -> None:
        self._id = f"{prefix}-{random.getrandbits(96):024x}"
        self._model, self._created = model, int(time.time())

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
        if feed.tells_ids:
            choice["token_ids"] = list(record.token_ids)
        return {**self._frame(self.kind, feed, [choice]), "usage": usage(record)}

    def opening(self, feed: Feed) -> list[dict[str, Any]]:
        """Chunks before the text."""
        return []

    def piece(self, piece: str, feed: Feed, finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, **self._delta(piece, finish), "logprobs": None, "finish_reason": finish}
        if feed.tells_ids:
            choice["token_ids"] = feed.take_ids()
        return self._frame(self.chunk_kind, feed, [choice])

    def used(self, feed: Feed) -> dict[str, Any]:
        assert feed.turn.record is not None
        return {**self._frame(self.chunk_kind, feed, []), "usage": usage(feed.turn.record)}

    def _said(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _delta(self, piece: str, finish: str | None) -> dict[str, Any]:
        return {"text": piece}


class ChatShape(CompletionShape):
    """The same of a chat completion."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def opening(self, feed: Feed) -> list[dict[str, Any]]:
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [self._frame(self.chunk_kind, feed, [choice])]

    def _said(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None, "annotations": []}}

    def _delta(self, piece: str, finish: str | None) -> dict[str, Any]:
        return {"delta": {} if finish is not None else {"content": piece}}


async def completion_events(feed: Feed, shape: CompletionShape, include_usage: bool) -> AsyncGenerator[str, None]:
    async with aclosing(feed.pieces()) as pieces:
        first = await anext(pieces, "")  # before anything is sent: what is refused gets a status that says so
        for chunk in shape.opening(feed):
            yield sse_data(chunk)
        if first or feed.tells_ids:
            yield sse_data(shape.piece(first, feed))
        async for piece in pieces:
            yield sse_data(shape.piece(piece, feed))
    record = feed.turn.record
    assert record is not None
    yield sse_data(shape.piece("", feed, finish_reason(record)))
    if include_usage:
        yield sse_data(shape.used(feed))
    yield "data: [DONE]\n\n"


def sse_data(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"
