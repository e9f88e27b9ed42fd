"""What a request and a reply of OpenAI's API say: the prompt as bytes, the reply, the session, the usage."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from pensieve.lab.traffic.table import BLOCK_BYTES, Exchange, Salt

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
SESSION_HEADERS = ("x-session-id", "session-id", "x-conversation-id")
KEY_HEADERS = ("authorization", "x-api-key", "api-key")
RESPONSES_KEPT = 100_000
"""Ids of responses that a later request may go on from."""


class Recorded:
    """Requests on their way to rows. salt, size: of the file, and the bytes of its blocks."""

    def __init__(self, salt: Salt, size: int = BLOCK_BYTES) -> None:
        self.salt, self.size = salt, size
        self._responses: OrderedDict[str, tuple[int, str, int | None]] = OrderedDict()

    def asked(self, number: int, at_s: float, headers: Mapping[str, str], body: bytes) -> Reply:
        """headers: in small letters. Raises ValueError for a body that is no JSON object."""
        asked = json.loads(body)
        if not isinstance(asked, dict):
            raise ValueError("the body is no JSON object")
        row = Exchange(number, at_s, model=_name(asked.get("model")))
        key = next((headers[name] for name in KEY_HEADERS if name in headers), None)
        row.tenant = self.salt.name(key) if key else None
        prompt, before = b"", asked.get("previous_response_id")
        for source, said in (
            ("header", next((headers[name] for name in SESSION_HEADERS if name in headers), None)),
            ("body", asked.get("session_id") or asked.get("conversation")),
            ("previous_response_id", before),
            ("prompt_cache_key", asked.get("prompt_cache_key")),
            ("user", asked.get("user")),
        ):
            if said and row.session is None:
                row.session, row.session_from = self.salt.name(str(said)), source
        if isinstance(before, str):
            row.parent, known, row.kept_tokens = self._responses.get(before, (None, None, None))
            if row.session_from == "previous_response_id":
                row.session = known
        else:
            prompt = b"".join(prompt_pieces(asked))
            if prompt:
                row.prompt_bytes, row.blocks = len(prompt), self.salt.blocks(prompt, self.size)
        return Reply(self, row, prompt[-(len(prompt) % self.size) :] if len(prompt) % self.size else b"")

    def told(self, response: str, row: Exchange) -> None:
        """A response that a later request may name."""
        if row.session is None:
            row.session, row.session_from = self.salt.name(response), "previous_response_id"
        known = (
            None if row.prompt_tokens is None or row.output_tokens is None else row.prompt_tokens + row.output_tokens
        )
        self._responses[response] = (row.request, row.session, known)
        if len(self._responses) > RESPONSES_KEPT:
            self._responses.popitem(last=False)


class Reply:
    """A reply as it comes, in parts. marks: when which byte of it was there, of its first ones."""

    def __init__(self, recorded: Recorded, row: Exchange, rest: bytes) -> None:
        self.row = row
        self._recorded, self._rest = recorded, rest  # rest: of the prompt, behind its last full block
        self._left, self._read = b"", 0
        self._said: list[str] = []
        self._tools: dict[int, list[str]] = {}
        self._response: str | None = None

    def part(self, data: bytes, marks: Iterable[tuple[float, int]], streamed: bool) -> None:
        if not streamed:
            self._left += data
            return
        marks = list(marks)
        *lines, self._left = (self._left + data).split(b"\n")
        for line in lines:
            self._read += len(line) + 1
            if not line.startswith(b"data:") or line.startswith(b"data: [DONE]"):
                continue
            try:
                event = json.loads(line[5:])
            except ValueError:
                continue
            if isinstance(event, dict) and self._take(event) and self.row.first_token_s is None:
                self.row.first_token_s = next((at_s for at_s, end in marks if end >= self._read - 1), None)

    def end(self, status: Any, at_s: float | None, streamed: bool) -> Exchange:
        """The row, complete. status: as of the row."""
        row, recorded = self.row, self._recorded
        row.status, row.end_s = status, at_s
        if not streamed and self._left:
            try:
                body = json.loads(self._left)
            except ValueError:
                body = None
            if isinstance(body, dict):
                self._take(body)
        said = "".join([*self._said, *(_call(name, "".join(rest)) for name, *rest in self._tools.values())])
        data = said.encode("utf-8", "replace")
        row.output_bytes = len(data)
        if row.blocks is not None:
            row.output_blocks = recorded.salt.blocks(self._rest + data, recorded.size)
        if self._response is not None:
            recorded.told(self._response, row)
        return row

    def _take(self, event: dict[str, Any]) -> bool:
        """Read an event, or a whole body; returns whether it holds some of the reply."""
        inner = event.get("response")
        body: dict[str, Any] = inner if isinstance(inner, dict) else event
        if isinstance(usage := body.get("usage"), dict):
            self._usage(usage)
        if body.get("object") == "response" and isinstance(body.get("id"), str):
            self._response = body["id"]
        if event.get("error") or event.get("type") in ("error", "response.failed"):
            self.row.finish_reason = "error"
        kind = event.get("type")
        if isinstance(kind, str) and kind.endswith(".delta") and isinstance(event.get("delta"), str):
            self._said.append(event["delta"])
            return bool(event["delta"])
        if isinstance(output := body.get("output"), list) and output:  # a whole response: it has the names of calls too
            self._said = [piece.decode("utf-8", "replace") for piece in _items(output, bare=True)]
        choices = event.get("choices")
        first = next((one for one in choices if isinstance(one, dict)), None) if isinstance(choices, list) else None
        if first is None or first.get("index"):
            return False
        self.row.finish_reason = _name(first.get("finish_reason")) or self.row.finish_reason
        message = first.get("delta") or first.get("message") or first
        thought = message.get("reasoning_content") or message.get("reasoning")  # some servers say it under both names
        texts = [one for one in (thought, message.get("content"), message.get("text")) if isinstance(one, str) and one]
        self._said += texts
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            known = self._tools.setdefault(call.get("index", len(self._tools)), [function.get("name") or ""])
            known.append(function.get("arguments") or "")
        return bool(texts or message.get("tool_calls"))

    def _usage(self, usage: dict[str, Any]) -> None:
        row = self.row
        row.prompt_tokens = usage.get("prompt_tokens", usage.get("input_tokens", row.prompt_tokens))
        row.output_tokens = usage.get("completion_tokens", usage.get("output_tokens", row.output_tokens))
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        row.cached_tokens = details.get("cached_tokens", usage.get("prompt_cache_hit_tokens", row.cached_tokens))
        for tier in ("gpu", "cpu", "disk"):
            setattr(row, f"cached_{tier}_tokens", details.get(tier, getattr(row, f"cached_{tier}_tokens")))


def prompt_pieces(asked: Mapping[str, Any]) -> Iterable[bytes]:
    """The prompt of a request, rendered, a piece a message. A reply is rendered as its message is in the next prompt, so that
    this begins with prompt and reply."""
    if tools := asked.get("tools"):
        yield _plain(tools)
    prompt = asked.get("prompt")
    if prompt is not None:
        yield prompt.encode("utf-8", "replace") if isinstance(prompt, str) else _plain(prompt)
        return
    if asked.get("instructions"):
        yield _message("system", str(asked["instructions"]))
    given = asked.get("messages", asked.get("input"))
    yield from _items([{"role": "user", "content": given}] if isinstance(given, str) else given or [])
    yield _message("assistant", "")


def _items(items: Iterable[Any], bare: bool = False) -> Iterable[bytes]:
    """bare: as the model says them, the first without its role."""
    for place, item in enumerate(items):
        if not isinstance(item, dict):
            continue
        role = str(item.get("role") or ("assistant" if item.get("type") == "function_call" else "tool"))
        said = _text(item.get("reasoning_content") or item.get("reasoning")) + _text(item.get("content"))
        said += _text(item.get("output"))
        if item.get("type") == "function_call":
            said += _call(str(item.get("name")), str(item.get("arguments")))
        for call in item.get("tool_calls") or ():
            function = call.get("function") or {}
            said += _call(str(function.get("name")), str(function.get("arguments")))
        yield said.encode("utf-8", "replace") if bare and not place else _message(role, said)


def _message(role: str, text: str) -> bytes:
    return f"\n<{role}>\n{text}".encode("utf-8", "replace")


def _call(name: str, arguments: str) -> str:
    return f"\n<call {name}>{arguments}"


def _text(content: Any) -> str:
    """Of a text, or of parts: what is no text, such as an image, counts as the hash of what was sent."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    return "".join(
        part["text"]
        if isinstance(part, dict) and isinstance(part.get("text"), str)
        else hashlib.sha256(_plain(part)).hexdigest()
        for part in parts
    )


def _plain(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False).encode("utf-8", "replace")


def _name(value: Any) -> str | None:
    return value if isinstance(value, str) else None
