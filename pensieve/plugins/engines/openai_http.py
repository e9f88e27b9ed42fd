"""Any endpoint that speaks OpenAI's protocol of completions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from time import monotonic, sleep
from typing import Any, Literal

from pensieve.core.plan import StartReport
from pensieve.core.request import Request
from pensieve.errors import ConfigError, EngineFailed
from pensieve.lab.results.identity import UNSTATED
from pensieve.plugins.engines.base import EngineSetup
from pensieve.plugins.engines.completions import HttpEngine
from pensieve.plugins.engines.process import POLL_S
from pensieve.serve.systems.base import Capabilities

KEY_ENV = "OPENAI_API_KEY"
REFUSES_START = (401, 403)


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
        key_env: str = KEY_ENV,
        prompts: Literal["ids", "text"] = "ids",
        session_header: str | None = None,
        start_timeout_s: float = 10.0,
    ) -> None:
        super().__init__(setup, start_timeout_s)
        self._base_url, self._model, self._key_env = base_url.rstrip("/"), model, key_env
        self._prompts, self._session_header = prompts, session_header

    def check(self) -> None:
        if not self._base_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"baseline.engine.base_url={self._base_url!r} is no address of a server; write http://127.0.0.1:8000/v1."
            )
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
        self._wait_until_listed()
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

    def _wait_until_listed(self) -> None:
        """Until the server lists its models, or answers that it has no such list where the model is named."""
        ends = monotonic() + self._timeout_s
        while (status := self._page(self.health)[0]) != 200:
            if status in REFUSES_START:
                raise EngineFailed(
                    f"The server at {self._base_url} refuses the key in the environment variable {self._key_env} ({status}); "
                    "put its key there, or name another variable with baseline.engine.key_env."
                )
            if status is not None and status < 500 and self._model is not None:
                return
            if monotonic() > ends:
                said = "nothing answers there" if status is None else f"it answers {status}"
                raise EngineFailed(
                    f"No server lists its models at {self._base_url}/models ({said} after {self._timeout_s:g} s); start one, "
                    "or correct baseline.engine.base_url. baseline.engine.start_timeout_s waits longer for one that loads."
                )
            sleep(POLL_S)

    def _body(self, request: Request) -> dict[str, Any]:
        body, tokenizer = {**super()._body(request), "model": self._model}, self._setup.tokenizer
        if self._prompts == "text" and tokenizer is not None:
            body["prompt"] = tokenizer.decode(body["prompt"])
        if self._session_header:
            body["history"] = "whole"  # to our own server: not a message to be appended to what the session holds
        return body

    def _headers(self, request: Request) -> dict[str, str]:
        return {self._session_header: request.session} if self._session_header else {}
