"""What clients get of a turn: completions, chat completions and responses, whole or in events; and of a session."""

import asyncio
import itertools
import json
import random
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from pensieve.core.request import Event
from pensieve.errors import PensieveError
from pensieve.serve.record import TurnRecord
from pensieve.serve.server.api import Generation, Server, Stream, Turn
from pensieve.serve.server.conversations import Conversation, Stored, prompt_details
from pensieve.serve.server.gate import SESSION_HEADER, error_body
from pensieve.serve.server.schemas import ChatBody, CompletionBody, ResponseBody
from pensieve.serve.tokenizer import Message

_INLINE_BYTES = 16_384  # of a body whose prompt is made in the event loop


class ClientLeft(HTTPException):
    """Nobody is there to get what the turn would still say."""

    def __init__(self) -> None:
        super().__init__(499)  # as nginx logs it


class Reply(Stream, ABC):
    """A turn in the event loop, told in the form of one API: whole, or in events as its pieces come.

    tells_ids: a piece for each token, with its text if that is decided.
    """

    tells_ids = False

    def __init__(self, turn: Turn, streams: bool | None) -> None:
        super().__init__(turn)
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[Event | None] = asyncio.Queue()  # None: the end
        self._ids: list[int] = []  # of the tokens that came since the last piece
        self._streams = bool(streams)
        if not streams:
            turn.on_event = None

    # -- its form -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """All of it, once the turn has ended."""

    def opening(self) -> Iterable[str]:
        """Events before the first piece."""
        return ()

    @abstractmethod
    def piece(self, text: str) -> str:
        """The event that tells this text."""

    @abstractmethod
    def ending(self) -> Iterable[str]:
        """Events behind the last piece."""

    def failed(self, error: PensieveError) -> str:
        """After the first byte: the status has been sent."""
        return _event(error_body(str(error), "server_error"))

    # -- how it is told -----------------------------------------------------------------------------------------------

    @property
    def said(self) -> Generation:
        """What became of the turn, which has ended."""
        return self.turn.future.result()

    def on_event(self, event: Event | None) -> None:
        """Queue an event for the loop; called in the engine's thread."""
        self._loop.call_soon_threadsafe(self._arrived.put_nowait, event)

    async def answer(self, request: Request, begin: Callable[[], None]) -> Response:
        """What came of the turn that `begin` begins. Raises what ends it before the first byte: it gets a status that says
        so; and ClientLeft."""
        if len(await request.body()) < _INLINE_BYTES:
            begin()
        else:
            await asyncio.to_thread(begin)
        if self.turn.server.system.clock.virtual:
            self._loop.run_in_executor(None, self.turn.server.drive, self.turn.future)
        name = self.turn.conversation.id
        headers = {SESSION_HEADER: name} if name.isascii() and name.isprintable() else {}
        if not self._streams:
            async with self._watched(request):
                await asyncio.shield(asyncio.wrap_future(self.turn.future))
            return JSONResponse(self.whole(), headers=headers)
        pieces = self._pieces(request)
        first = await anext(pieces, "")
        headers |= {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return _EventStream(self._told(first, pieces), media_type="text/event-stream", headers=headers)

    async def _told(self, first: str, pieces: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        try:
            async with aclosing(pieces):
                for event in self.opening():
                    yield event
                if first or self.tells_ids:
                    yield self.piece(first)
                async for text in pieces:
                    yield self.piece(text)
            for event in self.ending():
                yield event
        except PensieveError as error:
            yield self.failed(error)
        except ClientLeft:
            pass

    async def _pieces(self, request: Request) -> AsyncGenerator[str, None]:
        """Its text. Raises what the turn ended with, or ClientLeft."""
        async with self._watched(request):
            while (event := await self._arrived.get()) is not None:
                if event.token is None:
                    continue
                self._ids.append(event.token)
                piece = self._text.push(event.token)
                if piece or self.tells_ids:
                    yield piece
        self.turn.future.result()
        if rest := self._text.finish():
            yield rest

    @asynccontextmanager
    async def _watched(self, request: Request) -> AsyncIterator[None]:
        """Meanwhile the turn, and so whatever waits for it, ends when its client leaves; behind it has ended. Raises
        ClientLeft."""
        left = False

        async def watch() -> None:
            nonlocal left
            while (await request.receive())["type"] != "http.disconnect":
                pass
            left = True
            self._end()

        watching = asyncio.ensure_future(watch())
        try:
            yield
            if left:
                raise ClientLeft
        finally:
            watching.cancel()
            self._end()

    def _end(self) -> None:
        """Cancel the turn, unless it has ended."""
        if not self.turn.future.done():
            self.turn.cancel()


class _EventStream(StreamingResponse):
    """Starlette's sends from a task beside one that waits for the client to leave, which takes several rounds of the loop
    before the first byte; here the reply knows when its client leaves."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.stream_response(send)


class CompletionReply(Reply):
    """A completion."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    _behind: dict[str, Any] = {"text": ""}  # noqa: RUF012

    def __init__(self, turn: Turn, body: ChatBody | CompletionBody, model: str) -> None:
        super().__init__(turn, body.stream)
        self._id = f"{self.prefix}-{random.getrandbits(96):024x}"
        self._model, self._created = model, int(time.time())
        self._counts = bool((body.stream_options or {}).get("include_usage"))
        self.tells_ids = isinstance(body, CompletionBody) and bool(body.return_token_ids)

    def whole(self) -> dict[str, Any]:
        record = self.said.turn
        choice = {"index": 0, **self._said(self.said.text), "logprobs": None, "finish_reason": _finish_reason(record)}
        if self.tells_ids:
            choice["token_ids"] = list(record.token_ids)
        return {**self._frame(self.kind, [choice]), "usage": _usage(record)}

    def piece(self, text: str) -> str:
        return self._chunk(self._delta(text))

    def ending(self) -> Iterator[str]:
        record = self.said.turn
        yield self._chunk(self._behind, _finish_reason(record))
        if self._counts:
            yield _event({**self._frame(self.chunk_kind, []), "usage": _usage(record)})
        yield "data: [DONE]\n\n"

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        told = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        return {**told, "session_id": self.turn.conversation.id, "choices": choices}

    def _chunk(self, said: dict[str, Any], finish: str | None = None) -> str:
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish}
        if self.tells_ids:
            choice["token_ids"], self._ids = self._ids, []
        return _event(self._frame(self.chunk_kind, [choice]))

    def _said(self, text: str) -> dict[str, Any]:
        """The whole text."""
        return {"text": text}

    _delta = _said  # a piece of it


class ChatReply(CompletionReply):
    """A chat completion."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    _behind: dict[str, Any] = {"delta": {}}  # noqa: RUF012

    def opening(self) -> Iterable[str]:
        return (self._chunk({"delta": {"role": "assistant", "content": ""}}),)

    def _said(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None, "annotations": []}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}


_NOT_OURS = {
    "object": "response", "background": False, "error": None, "max_tool_calls": None, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "prompt_cache_key": None, "reasoning": None, "safety_identifier": None,
    "service_tier": "default", "text": {"format": {"type": "text"}}, "top_logprobs": 0, "user": None,
}  # fmt: skip
"""Of every response: fields that its schema asks for and that nothing here decides."""


class ResponseReply(Reply):
    """A response, which owns its KV."""

    def __init__(self, turn: Turn, body: ResponseBody, model: str) -> None:
        super().__init__(turn, body.stream)
        self.id, self._item = f"resp_{secrets.token_hex(16)}", f"msg_{secrets.token_hex(16)}"
        self._body, self._model = body, model
        self._created = int(time.time())
        self._numbers = itertools.count()

    def begin(self, tenant: str, previous: tuple[Conversation, Stored] | None) -> None:
        """Begin its turn. Its instructions are those of this response: earlier ones are not carried over."""
        instructions = self._body.instructions
        system: list[Message] = [] if instructions is None else [{"role": "system", "content": instructions}]
        said: list[Message] = []
        if previous is not None:
            owner, stored = previous
            said = (owner.messages or [])[int(stored.instructed) : stored.messages]
        messages = [*system, *said, *self._body.messages]
        self.turn.server.conversations.chat(self.turn, tenant, None, messages)

    def whole(self) -> dict[str, Any]:
        """The finished response, which is stored if it is to be; if not, its conversation is given up."""
        turn, record = self.turn, self.said.turn
        final = self._object("incomplete" if record.finish_reason == "length" else "completed", self.said.text, record)
        conversations = turn.server.conversations
        if self._body.store is not False and turn.messages is not None:
            instructed = self._body.instructions is not None
            conversations.store(turn.conversation, self.id, Stored(final, len(turn.messages), instructed))
        else:
            conversations.give_up(turn.conversation)
        return final

    def opening(self) -> Iterator[str]:
        yield self._event("response.created", response=self._object("in_progress"))
        yield self._event("response.in_progress", response=self._object("in_progress"))
        yield self._event("response.output_item.added", output_index=0, item=self._message("in_progress", ""))
        yield self._text_event("response.content_part.added", part=_part(""))

    def piece(self, text: str) -> str:
        return self._text_event("response.output_text.delta", delta=text, logprobs=[])

    def ending(self) -> Iterator[str]:
        final = self.whole()
        yield self._text_event("response.output_text.done", text=self.said.text, logprobs=[])
        yield self._text_event("response.content_part.done", part=_part(self.said.text))
        yield self._event("response.output_item.done", output_index=0, item=final["output"][0])
        yield self._event(f"response.{final['status']}", response=final)

    def failed(self, error: PensieveError) -> str:
        failure = {"code": "server_error", "message": str(error)}
        return self._event("response.failed", response={**self._object("failed"), "error": failure})

    def _object(self, status: str, text: str = "", record: TurnRecord | None = None) -> dict[str, Any]:
        """The response as JSON. record: of the turn that has ended."""
        body, turn = self._body, self.turn
        nothing_said = {"description": None, "parameters": None, "strict": None}
        return {
            **_NOT_OURS,
            "id": self.id,
            "created_at": self._created,
            "completed_at": None if record is None else int(time.time()),
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": [] if record is None else [self._message(status, text)],
            "parallel_tool_calls": bool(body.parallel_tool_calls),
            "previous_response_id": body.previous_response_id,
            "session_id": turn.conversation.id,
            "store": body.store is not False,
            "temperature": turn.sampling.temperature,
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": [{"type": "function", **nothing_said, **tool["function"]} for tool in turn.tools or ()],
            "top_p": turn.sampling.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None if record is None else self._usage(record),
        }

    def _message(self, status: str, text: str) -> dict[str, Any]:
        content = [_part(text)] if text or status != "in_progress" else []
        return {"type": "message", "id": self._item, "status": status, "role": "assistant", "content": content}

    def _usage(self, record: TurnRecord) -> dict[str, Any]:
        told = _usage(record)
        return {
            "input_tokens": told["prompt_tokens"],
            "input_tokens_details": told["prompt_tokens_details"],
            "output_tokens": told["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": told["total_tokens"],
        }

    def _event(self, kind: str, **fields: Any) -> str:
        return f"event: {kind}\n{_event({'type': kind, 'sequence_number': next(self._numbers), **fields})}"

    def _text_event(self, kind: str, **fields: Any) -> str:
        return self._event(kind, item_id=self._item, output_index=0, content_index=0, **fields)


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _finish_reason(record: TurnRecord) -> str:
    return "length" if record.finish_reason == "length" else "stop"


def _usage(record: TurnRecord) -> dict[str, Any]:
    """Tokens of a turn, and where its prompt was found: gpu + cpu + disk + recomputed + new = prompt_tokens."""
    prompt = record.prompt_tokens or 0
    return {
        "prompt_tokens": prompt,
        "completion_tokens": record.output_tokens,
        "total_tokens": prompt + record.output_tokens,
        "prompt_tokens_details": prompt_details(record),
    }


def session_line(server: Server, conversation: Conversation) -> dict[str, Any]:
    """An entry of /v1/sessions. kv: where each chunk is, see CacheManager.places."""
    return {
        "id": conversation.id,
        "object": "session",
        "created_at": int(conversation.created_at),
        "used_at": int(conversation.used_at),
        "turns": len(conversation.marks),
        "tokens": len(conversation.tokens),
        "busy": not conversation.idle,
        "forked_from": conversation.parent,
        "kv": server.system.places(conversation.engine_name),
    }


def session_body(server: Server, conversation: Conversation) -> dict[str, Any]:
    names = {one.engine_name: one.id for one in server.conversations.of(conversation.tenant)}  # and of nobody else
    turns = []
    for number, mark in enumerate(list(conversation.marks), start=1):
        misses = [{**miss, "evicted_by": names.get(miss["evicted_by"])} for miss in mark.told["misses"]]
        turns.append({"turn": number, **mark.told, "misses": misses})
    return {
        **session_line(server, conversation),
        "keep_alive": conversation.keep_alive_s,
        "chunk_tokens": server.system.chunk_tokens,
        "statistics": turns,
    }
