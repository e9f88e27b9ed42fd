"""Any endpoint that speaks OpenAI's protocol of completions."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from time import monotonic, sleep
from typing import Any, Literal

from pensieve.core.plan import StartReport
from pensieve.core.request import Free, Request, tokens_of
from pensieve.errors import ConfigError, EngineFailed, RequestFailed
from pensieve.lab.results.identity import UNSTATED, text_hash
from pensieve.plugins.engines.base import Channel, EngineSetup, OutsideEngine, Reply
from pensieve.plugins.engines.completions import Answer, AnswerBroken, CompletionsClient, broken
from pensieve.plugins.engines.process import POLL_S
from pensieve.serve.systems.base import Capabilities

KEY_ENV = "OPENAI_API_KEY"
MODELS = "/models"
CARD = ("id", "root", "parent", "owned_by", "max_model_len", "meta")
PROPS = ("build_info", "model_path", "total_slots", "chat_template", "modalities")
"""What servers say of a model and of themselves that is the same as long as they are: vLLM, llama.cpp, ours."""

REFUSES_START = (401, 403)
AT_ONCE = 256
log = logging.getLogger(__name__)


class OpenAIHttp(OutsideEngine):
    """A server that somebody else started. Its cache is what it is: the trial's own counts tell whether it was cold.

    base_url: with its version, "http://127.0.0.1:8000/v1". model: as the server calls it, which may be otherwise than it
    lists it; null: the first that it lists, which a server without such a list cannot do without.
    key_env: the environment variable that holds the key, where one is needed. prompts: ids sends token ids, text what the
    tokenizer makes of them. session_header: a header that carries the conversation's name (our own server's is X-Session-Id);
    null: none. start_timeout_s: for how long it may not answer yet.

    A server's token ids are taken where it gives them (token_ids), else its text is encoded. Cached tokens are those of its
    `usage`, and on which tier where it says so, as ours does; a server that reports none leaves them null. Nothing is asked
    twice: an answer that breaks off, or one that says "too many requests", fails its request alone.
    """

    def __init__(
        self,
        setup: EngineSetup,
        *,
        base_url: str,
        model: str | None = None,
        key_env: str = KEY_ENV,
        prompts: Literal["ids", "text"] = "ids",
        session_header: str | None = None,
        start_timeout_s: float = 10.0,
    ) -> None:
        self.can = Capabilities(starts_empty=False)
        self.at_once = AT_ONCE
        self._setup = setup
        self._base_url, self._model, self._key_env = base_url.rstrip("/"), model, key_env
        self._prompts, self._session_header = prompts, session_header
        self._timeout_s = start_timeout_s
        self._client: CompletionsClient | None = None

    def check(self) -> None:
        if not self._base_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"baseline.engine.base_url={self._base_url!r} is no address of a server; write http://127.0.0.1:8000/v1."
            )
        if self._setup.tokenizer is None and self._prompts == "text":
            raise ConfigError("baseline=openai_http sends text only with a tokenizer; give the model one.")

    def identity(self) -> dict[str, str]:
        """What the server says of the model that would answer, of its version and of its settings; asked once. Times and
        random ids, which are others at each answer, are left out."""
        client = self._opened()
        try:
            cards = [card for card in _cards(client.page(MODELS)[1]) if self._model in (None, card["id"])][:1]
            card = {name: cards[0][name] for name in CARD if name in cards[0]} if cards else {}
            root = self._base_url.removesuffix("/v1")
            build, props = (_object(client.get(root + page)) for page in ("/version", "/props"))
            props = {name: props[name] for name in PROPS if name in props} | {
                "n_ctx": _object(props.get("default_generation_settings")).get("n_ctx")
            }
        finally:
            client.close()
        version = build.get("version") or props.get("build_info")
        known = version and "unknown" not in str(version)  # llama.cpp's word in a build that does not know its own
        if not card or not known:
            missing = "does not list the model" if known else "does not state its version"
            why = f"the server at {self._base_url} {missing}, so another model may answer there now"
            return {"server": self._base_url, UNSTATED: why}
        said = text_hash(json.dumps([card, build, props], sort_keys=True))
        found = {"server": self._base_url, "served_model": card.get("root") or card["id"], "server_version": version}
        return {name: str(value).replace(";", ",") for name, value in found.items()} | {"server_says": said[:16]}

    def _opened(self) -> CompletionsClient:
        key = os.environ.get(self._key_env)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return CompletionsClient(self._base_url, headers, health=MODELS)

    def start(self) -> StartReport:
        """Raises EngineFailed where no server answers in time, or it refuses the key."""
        self.check()
        self._client = client = self._opened()
        names = self._listed(client)
        if self._model is None and not names:
            raise EngineFailed(f"The server at {self._base_url} lists no model; name one with baseline.engine.model.")
        if self._model is not None and names and self._model not in names:
            listed = ", ".join(names)
            log.warning(
                "The server at %s lists %s; it is asked for %s all the same.", self._base_url, listed, self._model
            )
        self._model = self._model or names[0]
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

    def _listed(self, client: CompletionsClient) -> list[str]:
        """The models that the server lists, waiting until it does; none where it has no such list and the model is named."""
        ends = monotonic() + self._timeout_s
        while True:
            status, text = client.page(MODELS)
            if status in REFUSES_START:
                held = "the key" if os.environ.get(self._key_env) else "to answer without a key, and there is none"
                raise EngineFailed(
                    f"The server at {self._base_url} refuses {held} in the environment variable {self._key_env} ({status}); "
                    "put its key there, or name another variable with baseline.engine.key_env."
                )
            if status == 200:
                return [str(card["id"]) for card in _cards(text)]
            if status is not None and status < 500 and self._model is not None:
                return []
            if monotonic() > ends:
                said = "nothing answers there" if status is None else f"it answers {status}"
                if status is not None and status >= 500:
                    said += (
                        f" after {self._timeout_s:g} s; baseline.engine.start_timeout_s waits longer for one that loads"
                    )
                raise EngineFailed(
                    f"No server lists its models at {self._base_url}/models; start one, or correct "
                    f"baseline.engine.base_url ({said})."
                )
            sleep(POLL_S)

    def answer(self, request: Request, channel: Channel) -> Reply:
        """A server that breaks off one answer may give the next: the request fails. One that cannot be reached is gone."""
        assert self._client is not None
        ids, tokenizer = list(request.prompt), self._setup.tokenizer
        body = completion_body(
            request, self._model, tokenizer.decode(ids) if self._prompts == "text" and tokenizer else ids
        )
        if self._session_header:
            body["history"] = "whole"  # to our own server: not a message to be appended to what the session holds
        headers = {self._session_header: request.session} if self._session_header else {}
        try:
            with self._client.ask("/completions", body, headers) as answer:
                return read_completion(answer, request, channel, encoder(self._setup))
        except AnswerBroken as error:
            raise RequestFailed(str(error)) from error

    def forget(self, session: str | None) -> None:
        if session is None:
            raise ConfigError("A server cannot be told to empty its cache; restart it, or use cache_state=salted.")

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


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


def _cards(text: str) -> list[Mapping[str, Any]]:
    """The models of a list; none where it is none."""
    try:
        return [card for card in json.loads(text)["data"] if "id" in card]
    except (ValueError, TypeError, LookupError):
        return []


def _object(said: Any) -> Mapping[str, Any]:
    return said if isinstance(said, Mapping) else {}


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
