"""The completions protocol over HTTP: what is sent, and what comes back, streamed or whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pensieve.core.request import Free, Request, tokens_of
from pensieve.errors import ContextLengthError, EngineFailed, RequestFailed
from pensieve.plugins.engines.base import Channel, EngineSetup, Reply
from pensieve.plugins.engines.process import EngineProcess

CONNECT_S = 5.0
DONE = "[DONE]"
DATA = "data:"
REFUSES_KEY = 401


class AnswerBroken(EngineFailed):
    """A server lost one request, or broke off its answer; it may serve the next."""


class CompletionsClient:
    """One server. Any number of threads ask. Nothing is ever asked twice: a retry would hide a failure and count its time.

    read_timeout_s: between two pieces of an answer; None: no limit, as where a trial has its own. keeps_streams: the server
    keeps a connection after a streamed answer. llama.cpp's says so and closes it, some time after the last piece: a request
    sent meanwhile would be lost. Such a server gets a connection for each request, streamed or not, so that both pay the
    same for it. health: a page that it has as long as it serves.
    """

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str] | None = None,
        read_timeout_s: float | None = None,
        keeps_streams: bool = False,
        health: str = "/health",
    ) -> None:
        import httpx

        self.address, self._health = base_url, health
        kept = httpx.Limits(max_connections=None, max_keepalive_connections=32 if keeps_streams else 0)
        self._http = httpx.Client(
            base_url=base_url,
            headers=dict(headers or {}),
            timeout=httpx.Timeout(read_timeout_s, connect=CONNECT_S),
            transport=httpx.HTTPTransport(
                retries=0, limits=kept
            ),  # the client's own limits are not those of a transport
            trust_env=False,  # loopback, or the address that was given: no proxy between
        )

    def page(self, path: str, timeout_s: float = CONNECT_S) -> tuple[int | None, str]:
        """The status, None where no server answers, and the text."""
        import httpx

        try:
            response = self._http.get(path, timeout=timeout_s)
        except httpx.HTTPError:
            return None, ""
        return response.status_code, response.text

    def get(self, path: str, timeout_s: float = CONNECT_S) -> Any:
        """The answer's JSON; None where there is none, or no such page, or no server yet."""
        status, text = self.page(path, timeout_s)
        try:
            return json.loads(text) if status == 200 else None
        except ValueError:
            return None

    def healthy(self) -> bool:
        return self.page(self._health)[0] == 200

    def reachable(self) -> bool:
        """Whether the server answers, whatever it says."""
        return self.page(self._health)[0] is not None

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> int:
        """The status."""
        return self._http.post(path, json=dict(body or {})).status_code

    @contextmanager
    def ask(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Iterator[Answer]:
        """Leaving the block before the last piece closes the connection, by which servers know that nobody waits any more.
        Raises, here or while it is read, what `OutsideEngine.answer` may."""
        import httpx

        content = json.dumps(dict(body)).encode()
        kind = {"content-type": "application/json", **(headers or {})}
        try:
            with self._http.stream("POST", path, content=content, headers=kind) as response:
                yield Answer(response, bool(body.get("stream")), len(content))
        except httpx.HTTPError as error:
            refused = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            lost = self.reachable() if refused else isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError)
            said = f"({type(error).__name__}: {error})."
            if lost:
                raise AnswerBroken(f"The engine's server lost the request before it answered {said}") from error
            raise EngineFailed(f"The engine's server does not answer {said}") from error

    def close(self) -> None:
        self._http.close()


class Answer:
    """The answer to one request: its pieces as they come, one if it is not streamed.

    sent_bytes, received_bytes: of the bodies. whole: a stream has said that this was all of it.
    """

    def __init__(self, response: Any, streamed: bool, sent_bytes: int) -> None:
        self._response, self._streamed = response, streamed
        self.sent_bytes = sent_bytes
        self.whole = False

    @property
    def received_bytes(self) -> int:
        return int(self._response.num_bytes_downloaded)

    def pieces(self) -> Iterator[dict[str, Any]]:
        """The JSON objects of the answer. Raises ContextLengthError, RequestFailed; AnswerBroken, EngineFailed."""
        import httpx

        response = self._response
        try:
            if response.status_code != 200:
                raise _refusal(response.status_code, response.read())
            if not self._streamed:
                yield _object(response.read())
                return
            for line in response.iter_lines():
                text = line.removeprefix(DATA).strip() if line.startswith(DATA) else ""
                if text == DONE:
                    self.whole = True
                elif text:
                    piece = _object(text)
                    if piece.get("error"):
                        raise _refusal(_status_of(piece["error"]), text.encode())
                    yield piece
        except httpx.HTTPError as error:
            raise broken(f"{type(error).__name__}: {error}") from error


def completion_body(request: Request, model: str | None, prompt: list[int] | str) -> dict[str, Any]:
    """What OpenAI's protocol has, and what vLLM and llama.cpp add to it: exactly so many tokens, and their ids."""
    output = request.output
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output.max_new_tokens,
        "temperature": 0.0,
        "stream": request.stream,
        "return_token_ids": True,
        "ignore_eos": not isinstance(output, Free) or output.ignore_eos,
    }
    if request.stream:
        body["stream_options"] = {"include_usage": True}
    return body


def read_completion(
    answer: Answer,
    request: Request,
    channel: Channel,
    encode: Callable[[str], Sequence[int]],
    ends: Collection[int] = (),
) -> Reply:
    """The answer of a completions endpoint, streamed or whole. encode: of text that comes without ids. ends: ids of which the
    first ends it, where the server does not know them. Raises AnswerBroken where a stream ends without an end."""
    tokens: list[int] = []
    finish: str | None = None
    usage: Mapping[str, Any] = {}
    timings: Mapping[str, float] = {}
    for piece in answer.pieces():
        for choice in piece.get("choices", ()):
            ids = choice.get("token_ids")
            if ids is None:
                ids = encode(choice["text"]) if choice.get("text") else ()
            finish = choice.get("finish_reason") or finish
            ended = next((place for place, token in enumerate(ids, 1) if token in ends), None)
            wanted = channel.tell(*ids[:ended]) if request.stream else True
            if ended or not wanted:
                finish = "eos" if ended else finish
                return Reply(finish, sent_bytes=answer.sent_bytes, received_bytes=answer.received_bytes)
            tokens += ids
        usage, timings = piece.get("usage") or usage, piece.get("timings") or timings
    if request.stream and finish is None and not answer.whole:
        raise broken(f"after {len(tokens)} tokens, without an end")
    details = usage.get("prompt_tokens_details") or {}
    return Reply(
        finish,
        tokens=None if request.stream else tokens_of(tokens),
        prompt_tokens=usage.get("prompt_tokens"),
        cached_tokens=details.get("cached_tokens"),
        cached_on_host=details.get("cpu"),
        compute_ms=timings["prompt_ms"] + timings["predicted_ms"] if "prompt_ms" in timings else None,
        sent_bytes=answer.sent_bytes,
        received_bytes=answer.received_bytes,
    )


def encoder(setup: EngineSetup) -> Callable[[str], Sequence[int]]:
    def encode(text: str) -> Sequence[int]:
        if setup.tokenizer is None:
            raise RequestFailed("The server gives text and no token ids, and the model has no tokenizer to encode it.")
        return setup.tokenizer.encode(text)

    return encode


@contextmanager
def while_it_serves(process: EngineProcess, reachable: Callable[[], bool]) -> Iterator[None]:
    """An engine's answer that breaks off because the engine ended is told as that, with the last lines of its log; where it
    still answers, the request has failed alone."""
    try:
        yield
    except EngineFailed as error:
        if isinstance(error, AnswerBroken) and reachable():
            raise RequestFailed(str(error)) from error
        if process.alive and not isinstance(error, AnswerBroken):
            raise
        what = "does not answer any more" if process.alive else "ended while it served requests"
        raise process.failed(what) from error


def error_of(said: Mapping[str, Any], status: int) -> ContextLengthError | RequestFailed:
    """The error of an answer that holds one. Servers name a prompt that is too long in their own ways."""
    message = str(said.get("message") or said)
    kind = str(said.get("type") or "")
    too_long = kind == "exceed_context_size_error" or "maximum context length" in message or "max_model_len" in message
    if status in (400, 413, 422) and too_long:
        return ContextLengthError(f"The engine refused the request: {message.rstrip('.')}.")
    return RequestFailed(f"The engine answered {status}: {message.rstrip('.')}.")


def broken(why: str) -> AnswerBroken:
    return AnswerBroken(f"The engine's server broke off in the middle of its answer ({why}).")


def _refusal(status: int, body: bytes) -> ContextLengthError | RequestFailed | EngineFailed:
    text = body.decode("utf-8", errors="replace")
    try:
        said = json.loads(text)
    except ValueError:
        said = text[:300]
    said = said.get("error", said) if isinstance(said, dict) else said
    error = error_of(said if isinstance(said, dict) else {"message": str(said)}, status)
    if status == REFUSES_KEY:
        return EngineFailed(f"{error} Put its key into the environment variable that baseline.engine.key_env names.")
    return error


def _status_of(error: Any) -> int:
    """Of an error within a stream, whose code is a status in some servers and a word in others."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 500


def _object(text: str | bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise RequestFailed(f"The engine's answer is no JSON: {text[:200]!r}") from error
    if not isinstance(found, dict):
        raise RequestFailed(f"The engine's answer is no JSON object: {text[:200]!r}")
    return found
