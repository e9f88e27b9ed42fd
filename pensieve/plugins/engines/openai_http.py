"""Engines that are asked over HTTP by OpenAI's protocol of completions: what is sent and what comes back, streamed or whole;
and any endpoint that speaks it, as an engine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Literal

from pensieve.core.plan import StartReport
from pensieve.core.request import Free, Request, tokens_of
from pensieve.errors import ConfigError, ContextLengthError, EngineFailed, RequestFailed
from pensieve.lab.results.identity import UNSTATED
from pensieve.plugins.engines.base import Channel, EngineSetup, OutsideEngine, Reply
from pensieve.plugins.engines.process import POLL_S, EngineProcess
from pensieve.serve.systems.base import Capabilities

if TYPE_CHECKING:
    import httpx

CONNECT_S = 5.0


class HttpEngine(OutsideEngine):
    """A server, which `_process` runs where it is not somebody else's. Any number of threads ask.

    Nothing is asked twice: a retry would hide a failure and count its time. Each request opens a connection, streamed or not,
    so that all servers pay the same for it: llama.cpp's closes one that was kept some time after the last piece, and a
    request sent meanwhile would be lost. A request that is lost, or whose answer breaks off, fails alone as long as the
    server answers at the page `health`, whatever it says there.

    path: of completions. stops: the server knows what ends a Free output; of another one the stream is read until that comes.
    """

    path, health = "/v1/completions", "/health"
    stops = True
    _http: httpx.Client | None = None

    def __init__(self, setup: EngineSetup, start_timeout_s: float) -> None:
        self._setup, self._timeout_s = setup, start_timeout_s
        self._process: EngineProcess | None = None

    def _connect(self, base_url: str, headers: Mapping[str, str] | None = None) -> None:
        import httpx

        self._http = httpx.Client(
            base_url=base_url,
            headers=dict(headers or {}),
            timeout=httpx.Timeout(None, connect=CONNECT_S),  # a trial has a limit of its own
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,  # loopback, or the address that was given: no proxy between
        )

    def _page(self, path: str) -> tuple[int | None, str]:
        """The status, None where no server answers, and the text."""
        import httpx

        assert self._http is not None, "connected first"
        try:
            response = self._http.get(path, timeout=CONNECT_S)
        except httpx.HTTPError:
            return None, ""
        return response.status_code, response.text

    def _get(self, path: str) -> Any:
        """The answer's JSON; an empty object where there is none, or no such page, or no server yet."""
        status, text = self._page(path)
        return (_json(text) if status == 200 else None) or {}

    def _serve(self, process: EngineProcess, port: int) -> None:
        """Returns once the process answers at that port."""
        self._process = process
        self._connect(f"http://127.0.0.1:{port}")
        process.wait_until(lambda: self._page(self.health)[0] == 200, self._timeout_s)

    def close(self) -> None:
        if self._http is not None:
            self._http.close()
        if self._process is not None:
            self._process.close()

    # -- one request --------------------------------------------------------------------------------------------------

    def _body(self, request: Request) -> dict[str, Any]:
        """What OpenAI's protocol has, and what vLLM and llama.cpp add to it: exactly so many tokens, and their ids."""
        output = request.output
        stream = request.stream or (isinstance(output, Free) and not self.stops)
        return {
            "model": "served",
            "prompt": list(request.prompt),
            "max_tokens": output.max_new_tokens,
            "temperature": 0.0,
            "stream": stream,
            "return_token_ids": True,
            "ignore_eos": not isinstance(output, Free) or output.ignore_eos,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        }

    def _headers(self, request: Request) -> dict[str, str]:
        return {}

    def _encode(self, text: str) -> Sequence[int]:
        """Text that comes without ids."""
        if self._setup.tokenizer is None:
            raise RequestFailed("The server gives text and no token ids, and the model has no tokenizer to encode it.")
        return self._setup.tokenizer.encode(text)

    def answer(self, request: Request, channel: Channel) -> Reply:
        """Leaving before the last piece closes the connection, by which servers know that nobody waits any more."""
        import httpx

        assert self._http is not None, "start() comes first"
        body = self._body(request)
        try:
            with self._http.stream("POST", self.path, json=body, headers=self._headers(request)) as response:
                return self._read(response, body["stream"], request, channel)
        except httpx.HTTPError as error:
            raise self._lost(f"{type(error).__name__}: {error}") from error

    def _read(self, response: httpx.Response, stream: bool, request: Request, channel: Channel) -> Reply:
        tokens: list[int] = []
        finish: str | None = None
        usage: Mapping[str, Any] = {}
        timings: Mapping[str, float] = {}
        ends = () if self.stops else self._setup.ends(request)
        sent = int(response.request.headers["content-length"])
        for piece in _pieces(response, stream):
            if piece is None:
                break
            for choice in piece.get("choices", ()):
                ids = choice.get("token_ids")
                if ids is None:
                    ids = self._encode(choice["text"]) if choice.get("text") else ()
                finish = choice.get("finish_reason") or finish
                ended = next((place for place, token in enumerate(ids, 1) if token in ends), None)
                wanted = channel.tell(*ids[:ended]) if stream else True
                if ended or not wanted:
                    finish = "eos" if ended else finish
                    return Reply(finish, sent_bytes=sent, received_bytes=response.num_bytes_downloaded)
                tokens += ids
            usage, timings = piece.get("usage") or usage, piece.get("timings") or timings
        else:
            if stream and finish is None:
                raise self._lost(f"it broke off after {len(tokens)} tokens, without an end")
        details = usage.get("prompt_tokens_details") or {}
        return Reply(
            finish,
            tokens=None if stream else tokens_of(tokens),
            prompt_tokens=usage.get("prompt_tokens"),
            cached_tokens=details.get("cached_tokens"),
            cached_on_host=details.get("cpu"),
            compute_ms=timings["prompt_ms"] + timings["predicted_ms"] if "prompt_ms" in timings else None,
            sent_bytes=sent,
            received_bytes=response.num_bytes_downloaded,
        )

    def _lost(self, why: str) -> EngineFailed | RequestFailed:
        if self._page(self.health)[0] is not None:
            return RequestFailed(f"The engine's server lost the request, or broke off its answer ({why}).")
        if self._process is not None:
            return self._process.gone()
        return EngineFailed(f"The engine's server does not answer ({why}).")


def _pieces(response: httpx.Response, stream: bool) -> Iterator[dict[str, Any] | None]:
    """The JSON objects of the answer; None: that was all of it. Raises ContextLengthError, RequestFailed, EngineFailed."""
    if response.status_code != 200 or not stream:
        response.read()
    if response.status_code != 200:
        raise _error_of(_json(response.text) or response.text[:300], response.status_code)
    for line in response.iter_lines() if stream else (f"data:{response.text}",):
        text = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if text == "[DONE]":
            yield None
        elif text:
            piece = _json(text)
            if not isinstance(piece, dict):
                raise RequestFailed(f"The engine's answer is no JSON object: {text[:200]!r}")
            if error := piece.get("error"):
                code = error.get("code") if isinstance(error, dict) else None  # a status in some servers, else a word
                raise _error_of(error, code if isinstance(code, int) else 500)
            yield piece


def _json(text: str) -> Any:
    """None where it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _error_of(said: Any, status: int) -> ContextLengthError | RequestFailed | EngineFailed:
    """The error of an answer that holds one. Servers name a prompt that is too long in their own ways."""
    said = said.get("error", said) if isinstance(said, dict) else said
    error = said if isinstance(said, dict) else {"message": said}
    message = str(error.get("message") or error).rstrip(".")
    too_long = error.get("type") == "exceed_context_size_error" or "maximum context length" in message
    if status in (400, 413, 422) and (too_long or "max_model_len" in message):
        return ContextLengthError(f"The engine refused the request: {message}.")
    answered = f"The engine answered {status}: {message}."
    if status == 401:
        return EngineFailed(f"{answered} Put its key into the environment variable that baseline.engine.key_env names.")
    return RequestFailed(answered)


class OpenAIHttp(HttpEngine):
    """A server that somebody else started. Its cache is what it is: the trial's own counts tell whether it was cold.

    base_url: with its version, "http://127.0.0.1:8000/v1". model: as the server calls it, which may be otherwise than it
    lists it; null: the first that it lists, which a server without such a list cannot do without.
    key_env: the environment variable that holds the key, where one is needed. prompts: ids sends token ids, text what the
    tokenizer makes of them. session_header: a header that carries the conversation's name (our own server's is X-Session-Id);
    null: none. start_timeout_s: for how long it may not answer yet.

    A server's token ids are taken where it gives them (token_ids), else its text is encoded. Cached tokens are those of its
    `usage`, and on which tier where it says so, as ours does; a server that reports none leaves them null. An answer that
    says "too many requests" fails its request alone.
    """

    path, health = "/completions", "/models"
    can = Capabilities(starts_empty=False)

    def __init__(
        self,
        setup: EngineSetup,
        *,
        base_url: str,
        model: str | None = None,
        key_env: str = "OPENAI_API_KEY",
        prompts: Literal["ids", "text"] = "ids",
        session_header: str | None = None,
        start_timeout_s: float = 10.0,
    ) -> None:
        super().__init__(setup, start_timeout_s)
        self._base_url, self._model, self._key_env = base_url.rstrip("/"), model, key_env
        self._prompts, self._session_header = prompts, session_header

    def check(self) -> None:
        if self._setup.tokenizer is None and self._prompts == "text":
            raise ConfigError("baseline=openai_http sends text only with a tokenizer; give the model one.")

    def identity(self) -> dict[str, str]:
        """What the server says of the model that would answer and of its version: vLLM at /version, llama.cpp at /props."""
        self._open()
        try:
            cards = [card for card in self._cards() if self._model in (None, card["id"])][:1]
            root = self._base_url.removesuffix("/v1")
            said = self._get(root + "/version").get("version") or self._get(root + "/props").get("build_info")
        finally:
            self.close()
        unknown = "unknown" in str(said or "unknown")  # llama.cpp's word, in a build that does not know its own
        if not cards or unknown:
            missing = "does not state its version" if unknown else "does not list the model"
            why = f"the server at {self._base_url} {missing}, so another model may answer there now"
            return {"server": self._base_url, UNSTATED: why}
        model = cards[0].get("root") or cards[0]["id"]
        found = {"server": self._base_url, "served_model": model, "server_version": said}
        found["served_context"] = cards[0].get("max_model_len")
        return {name: str(value).replace(";", ",") for name, value in found.items()}

    def _open(self) -> None:
        key = os.environ.get(self._key_env)
        self._connect(self._base_url, {"authorization": f"Bearer {key}"} if key else {})

    def _cards(self) -> list[Mapping[str, Any]]:
        """The models that it lists; none where it has no such list."""
        try:
            return [card for card in self._get(self.health)["data"] if "id" in card]
        except (TypeError, LookupError):
            return []

    def start(self) -> StartReport:
        """Raises EngineFailed where no server answers in time, or it refuses the key."""
        self.check()
        self._open()
        ends = monotonic() + self._timeout_s
        while (status := self._page(self.health)[0]) is None or status >= 500:
            if monotonic() > ends:
                said = "nothing answers there" if status is None else f"it answers {status}"
                raise EngineFailed(
                    f"No server lists its models at {self._base_url}/models ({said} after {self._timeout_s:g} s); start one, "
                    "or correct baseline.engine.base_url. baseline.engine.start_timeout_s waits longer for one that loads."
                )
            sleep(POLL_S)
        if status in (401, 403):
            raise EngineFailed(
                f"The server at {self._base_url} refuses the key in the environment variable {self._key_env} ({status}); "
                "put its key there, or name another variable with baseline.engine.key_env."
            )
        cards = self._cards()
        if self._model is None and not cards:
            raise EngineFailed(f"The server at {self._base_url} lists no model; name one with baseline.engine.model.")
        self._model = self._model or str(cards[0]["id"])
        settings = {
            "engine": "openai",
            "base_url": self._base_url,
            "served_model": self._model,
            "prompts": self._prompts,
            "weights": "the server's",
            # What it has, only its owner knows.
            **dict.fromkeys(("gpu_tokens", "cpu_tokens", "gpu_bytes", "cpu_bytes", "kv_bytes_per_token", "dtype")),
        }
        return StartReport(0.0, 0.0, settings)

    def _body(self, request: Request) -> dict[str, Any]:
        body, tokenizer = {**super()._body(request), "model": self._model}, self._setup.tokenizer
        if self._prompts == "text" and tokenizer is not None:
            body["prompt"] = tokenizer.decode(body["prompt"])
        if self._session_header:
            body["history"] = "whole"  # to our own server: not a message to be appended to what the session holds
        return body

    def _headers(self, request: Request) -> dict[str, str]:
        return {self._session_header: request.session} if self._session_header else {}
