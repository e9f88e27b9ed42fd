"""Responses that own their KV: what /v1/responses makes of a turn, whole and in events."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from pensieve.errors import ConfigError, PensieveError
from pensieve.serve.record import TurnRecord
from pensieve.serve.server.conversations import Message, Stored
from pensieve.serve.server.feed import sse_data
from pensieve.serve.server.schemas import ResponseBody, text_of_parts, usage
from pensieve.serve.server.turn import Turn

if TYPE_CHECKING:
    from pensieve.serve.server.feed import Feed


_NOTHING_SAID = {"type": "function", "description": None, "parameters": None, "strict": None}
"""Of a function tool, whose every field is in the answer."""


class Responder:
    """One response on its way: the turn it makes, the object that clients get, and its events."""

    tells_ids = False

    def __init__(self, body: ResponseBody, model: str, tenant: str, turn: Turn) -> None:
        self.id = f"resp_{secrets.token_hex(16)}"
        self._turn = turn
        self._item = f"msg_{secrets.token_hex(16)}"
        self._body, self._model, self._tenant = body, model, tenant
        self._created = int(time.time())
        self._numbers = itertools.count()

    def begin(self, previous: Stored | None) -> None:
        """Begin the turn of this response. Its instructions are those of this response: earlier ones are not carried over."""
        new = messages_of(self._body.input)
        system: list[Message] = (
            [] if self._body.instructions is None else [{"role": "system", "content": self._body.instructions}]
        )
        if previous is None:
            self._turn.server.chat(self._turn, self._tenant, None, [*system, *new])
            return
        conversation, mark = previous.conversation, previous.mark
        skipped = int(previous.instructed)
        said = list(conversation.messages or ())[skipped : mark.messages]
        shift = len(system) - skipped
        replies = {place + shift: ids for place, ids in conversation.first_replies(mark.messages).items()}
        self._turn.server.go_on(self._turn, conversation, mark, [*system, *said, *new], replies)

    # -- the object -----------------------------------------------------------------------------------------------------

    def body(self, status: str, text: str = "", record: TurnRecord | None = None) -> dict[str, Any]:
        """The response as JSON."""
        b = self._body
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        done = record is not None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if done else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": incomplete,
            "instructions": b.instructions,
            "max_output_tokens": b.max_output_tokens,
            "max_tool_calls": None,
            "metadata": b.metadata or {},
            "model": self._model,
            "output": [self._message(status, text)] if done else [],
            "parallel_tool_calls": bool(b.parallel_tool_calls),
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "previous_response_id": b.previous_response_id,
            "prompt_cache_key": None,
            "reasoning": None,
            "safety_identifier": None,
            "service_tier": "default",
            "session_id": self._turn.conversation.id,
            "store": bool(b.store) if b.store is not None else True,
            "temperature": self._turn.sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": b.tool_choice if b.tool_choice is not None else "auto",
            "tools": [{**_NOTHING_SAID, **tool["function"]} for tool in self._turn.tools or ()],
            "top_logprobs": 0,
            "top_p": self._turn.sampling.top_p,
            "truncation": b.truncation or "disabled",
            "usage": None if record is None else _usage(record),
            "user": None,
        }

    def whole(self, text: str, feed: Feed) -> dict[str, Any]:
        """The finished response, which is stored if it is to be; if not, its conversation is given up."""
        turn, record = feed.turn, feed.turn.record
        assert record is not None
        final = self.body("incomplete" if record.finish_reason == "length" else "completed", text, record)
        conversations = turn.server.conversations
        if self._body.store is not False and turn.mark is not None:
            instructed = self._body.instructions is not None
            conversations.store(self.id, Stored(final, turn.conversation, turn.mark, instructed))
        else:
            conversations.give_up(turn.conversation)
        return final

    def _message(self, status: str, text: str) -> dict[str, Any]:
        return {
            "type": "message",
            "id": self._item,
            "status": status,
            "role": "assistant",
            "content": [_part(text)] if text or status != "in_progress" else [],
        }

    # -- its events -----------------------------------------------------------------------------------------------------

    async def events(self, feed: Feed) -> AsyncGenerator[str, None]:
        """The events of a stream."""
        async with aclosing(feed.pieces()) as pieces:
            text = await anext(pieces, "")  # before anything is sent: what is refused gets a status that says so
            yield self._event("response.created", response=self.body("in_progress"))
            yield self._event("response.in_progress", response=self.body("in_progress"))
            yield self._event("response.output_item.added", output_index=0, item=self._message("in_progress", ""))
            yield self._text_event("response.content_part.added", part=_part(""))
            if text:
                yield self._text_event("response.output_text.delta", delta=text, logprobs=[])
            try:
                async for piece in pieces:
                    text += piece
                    yield self._text_event("response.output_text.delta", delta=piece, logprobs=[])
            except PensieveError as error:
                failure = {"code": "server_error", "message": str(error)}
                yield self._event("response.failed", response={**self.body("failed"), "error": failure})
                return
        final = self.whole(text, feed)
        yield self._text_event("response.output_text.done", text=text, logprobs=[])
        yield self._text_event("response.content_part.done", part=_part(text))
        yield self._event("response.output_item.done", output_index=0, item=final["output"][0])
        yield self._event(f"response.{final['status']}", response=final)

    def _event(self, kind: str, **fields: Any) -> str:
        return f"event: {kind}\n{sse_data({'type': kind, 'sequence_number': next(self._numbers), **fields})}"

    def _text_event(self, kind: str, **fields: Any) -> str:
        return self._event(kind, item_id=self._item, output_index=0, content_index=0, **fields)


def messages_of(given: str | list[dict[str, Any]]) -> list[Message]:
    """Convert input items to messages. Raises ConfigError for items that are no text."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Message] = []
    for item in given:
        kind = item.get("type", "message")
        if kind == "message":
            role = {"developer": "system"}.get(str(item.get("role")), item.get("role"))
            if role not in ("system", "user", "assistant"):
                raise ConfigError(
                    f"An input message has the role {role!r}; it is user, assistant, system or developer."
                )
            messages.append({"role": role, "content": text_of_parts(item.get("content"))})
        elif kind == "function_call":
            function = {"name": str(item.get("name")), "arguments": str(item.get("arguments", ""))}
            call = {"id": str(item.get("call_id")), "type": "function", "function": function}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif kind == "function_call_output":
            text = text_of_parts(item.get("output"))
            messages.append({"role": "tool", "content": text, "tool_call_id": str(item.get("call_id"))})
        elif kind != "reasoning":  # what a model thought before is no part of the conversation
            raise ConfigError(f"An input item of type {kind!r} is not supported; send messages and function calls.")
    if not messages:
        raise ConfigError("input is empty; send a string, or at least one message.")
    return messages


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(record: TurnRecord) -> dict[str, Any]:
    told = usage(record)
    return {
        "input_tokens": told["prompt_tokens"],
        "input_tokens_details": told["prompt_tokens_details"],
        "output_tokens": told["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": told["total_tokens"],
    }
