"""What clients of the OpenAI API send: chat completions, completions and responses; and the numbers that they get back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from pensieve.core.hint import Hint
from pensieve.core.request import Free, Sampling, stops_of
from pensieve.errors import ConfigError
from pensieve.serve.record import TurnRecord
from pensieve.serve.server.conversations import LONGEST_NAME
from pensieve.serve.server.dialogue import Tools, Wish
from pensieve.serve.server.settings import ServeSettings

_BEYOND_ANY_MODEL = 2**31 - 1
Tokens = Annotated[int, Field(ge=1, le=_BEYOND_ANY_MODEL)]
Real = Annotated[float, Field(allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]


T = TypeVar("T")
MOST_LISTED = 2**20
Listed = Annotated[list[T], Field(fail_fast=True, max_length=MOST_LISTED)]
"""What is wrong in it is told once: an error an item takes gigabytes, and minutes in which nobody is served."""


def _tellable(value: Any) -> Any:
    """1e999 is JSON, and read as infinity, which is none."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise ValueError("it holds a number beyond what JSON can tell again") from None
    return value


ToldAgain = AfterValidator(_tellable)
"""Of what a client says as it likes, and gets back."""

MAX_STOPS = 16


class _Body(BaseModel):
    """Unknown fields are ignored, as OpenAI's own server does; fields that would change the reply and are not supported are
    refused by name."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    stream: bool | None = False
    temperature: Annotated[Real, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Real, Field(gt=0, le=1)] | None = None
    session_id: Name | None = Field(None, description="The conversation; also as header X-Session-Id.")
    history: Literal["whole", "new"] | None = Field(
        None, description="With a session_id: whether this is the whole conversation or what is new in it."
    )
    keep_alive: Annotated[Real, Field(gt=0, le=1e9)] | None = Field(
        None,
        description="Seconds without a turn after which the conversation may be given up. A hint: nothing is pinned.",
    )
    metadata: Annotated[dict[str, Any] | None, ToldAgain] = Field(
        None,
        description="Three of its keys are hints to the cache. expected_s: seconds from the reply to the next request. "
        "stop_reason: tool_use or end_turn, if the client knows how the reply will end. tool: its name.",
    )


class _Sampled(_Body):
    stop: str | Listed[str] | None = None
    seed: int | None = None
    n: int | None = 1
    presence_penalty: Real | None = 0.0
    frequency_penalty: Real | None = 0.0
    logit_bias: dict[str, Any] | None = None
    stream_options: dict[str, Any] | None = None

    @property
    def include_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))

    def refuse_unsupported(self) -> None:
        _refuse("n", self.n not in (None, 1), "one reply a request; send several requests")
        _refuse("presence_penalty", bool(self.presence_penalty), "leave it out, or 0")
        _refuse("frequency_penalty", bool(self.frequency_penalty), "leave it out, or 0")
        _refuse("logit_bias", bool(self.logit_bias), "leave it out")


class Tool(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: Literal["function"]
    function: Annotated[dict[str, Any] | None, ToldAgain] = None

    @model_validator(mode="after")
    def _flat_form(self) -> Tool:
        _tellable(self.model_extra)
        return self


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Listed[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: Listed[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def plain(self) -> Mapping[str, Any]:
        """As templates know it: the content is one string."""
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        message: dict[str, Any] = {"role": role, "content": text_of_parts(self.content)}
        for name in ("name", "tool_calls", "tool_call_id"):
            value = getattr(self, name)
            if value is not None:
                message[name] = value
        return message


class ChatBody(_Sampled):
    messages: Annotated[Listed[ChatMessage], Field(min_length=1)]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: Listed[Tool] | None = None
    response_format: dict[str, Any] | None = None

    def checked(self) -> None:
        self.refuse_unsupported()
        _refuse("logprobs", bool(self.logprobs) or bool(self.top_logprobs), "this engine returns none; leave it out")
        plain = (self.response_format or {"type": "text"}).get("type") == "text"
        _refuse("response_format", not plain, "the model's text comes as it is")


class CompletionBody(_Sampled):
    prompt: str | Listed[int] | Listed[str] | Listed[Listed[int]]
    max_tokens: Tokens | None = 16
    logprobs: int | None = None
    echo: bool | None = False
    suffix: str | None = None
    best_of: int | None = 1
    ignore_eos: bool | None = Field(
        False, description="Go on to max_tokens, whatever tokens end a reply. As vLLM has it."
    )
    return_token_ids: bool | None = Field(False, description="The reply's token ids beside its text. As vLLM has it.")

    def checked(self) -> str | list[int]:
        """The prompt."""
        self.refuse_unsupported()
        _refuse("logprobs", self.logprobs is not None, "this engine returns none; leave it out")
        _refuse("echo", bool(self.echo), "the prompt is not repeated")
        _refuse("suffix", bool(self.suffix), "text goes on to the right only")
        _refuse("best_of", self.best_of not in (None, 1), "one reply a request")
        prompt: Any = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            _refuse("prompt", len(prompt) != 1, "one prompt a request; send several requests")
            prompt = prompt[0]
        return prompt  # type: ignore[no-any-return]


class ResponseBody(_Body):
    input: str | Listed[dict[str, Any]] = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    max_output_tokens: Tokens | None = None
    tools: Listed[Tool] | None = None
    tool_choice: Annotated[Any, ToldAgain] = "auto"
    parallel_tool_calls: bool | None = True
    background: bool | None = False
    text: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = "disabled"
    top_logprobs: int | None = None
    seed: int | None = None

    def checked(self) -> None:
        _refuse("background", bool(self.background), "responses are made while the client waits; use stream")
        _refuse("top_logprobs", bool(self.top_logprobs), "this engine returns none; leave it out")
        form = (self.text or {}).get("format") or {"type": "text"}
        _refuse(
            "text.format", not isinstance(form, dict) or form.get("type") != "text", "the model's text comes as it is"
        )


class TokenizeBody(BaseModel):
    model_config = ConfigDict(extra="ignore")
    model: str | None = None
    prompt: str | None = None
    messages: Listed[ChatMessage] | None = None


def _refuse(field: str, given: bool, instead: str) -> None:
    if given:
        raise ConfigError(f"{field} is not supported as given: {instead}.")


def text_of_parts(content: str | list[dict[str, Any]] | None) -> str:
    """The text of content parts (text, input_text, output_text). Raises ConfigError for anything that is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        if part.get("type") not in ("text", "input_text", "output_text", "refusal"):
            raise ConfigError(f"A content part of type {part.get('type')!r} is not supported: the model reads text.")
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise ConfigError("A content part has no text.")
        texts.append(text)
    return "".join(texts)


def tools_of(tools: list[Tool] | None) -> Tools | None:
    """Function schemas for the template; the flat form of /v1/responses as that of /v1/chat/completions."""
    if not tools:
        return None
    listed = []
    for tool in tools:
        if tool.function is not None:
            listed.append({"type": "function", "function": tool.function})
        else:
            listed.append({"type": "function", "function": dict(tool.model_extra or {})})
    return listed


def wish_of(
    body: _Body,
    settings: ServeSettings,
    default: Sampling,
    max_tokens: int | None,
    stops: tuple[str, ...] = (),
    seed: int | None = None,
    tools: Tools | None = None,
    default_seed: int = 0,
    ignore_eos: bool = False,
    **options: Any,
) -> Wish:
    """How the reply is wanted. Equal seeds and prompts draw equal tokens; without a seed each request draws its own.
    default: the temperature and top_p of clients that give none."""
    sampling = Sampling(
        default.temperature if body.temperature is None else body.temperature,
        default.top_p if body.top_p is None else body.top_p,
        seed=default_seed if seed is None else seed,
        anonymous=seed is not None,
    )
    output = Free(settings.max_new_tokens if max_tokens is None else max_tokens, stops, ignore_eos=ignore_eos)
    return Wish(
        output, sampling, max_tokens is None, body.keep_alive, tools, {**options, "hint": hint_of(body.metadata)}
    )


def hint_of(metadata: Mapping[str, Any] | None) -> Hint | None:
    """What a request's metadata says of the time after its reply; its values are texts in OpenAI's own clients. Raises
    ConfigError for a value that is none of what its key can be."""
    given = metadata or {}
    said = {key: given[key] for key in ("stop_reason", "tool", "expected_s") if key in given}
    if isinstance(expected := said.get("expected_s"), str):
        try:
            said["expected_s"] = float(expected)
        except ValueError:
            raise ConfigError(f"metadata.expected_s is a number of seconds, not {expected!r}.") from None
    return Hint(**said) if said else None


def client_stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = tuple(text for text in stops_of(stop) if text)
    if len(stops) > MAX_STOPS:
        raise ConfigError(f"stop holds {len(stops)} strings; {MAX_STOPS} are the most.")
    return stops


def usage(record: TurnRecord) -> dict[str, Any]:
    """Tokens of a turn, and where its prompt was found: gpu + cpu + disk + recomputed + new = prompt_tokens."""
    prompt = record.prompt_tokens or 0
    return {
        "prompt_tokens": prompt,
        "completion_tokens": record.output_tokens,
        "total_tokens": prompt + record.output_tokens,
        "prompt_tokens_details": prompt_details(record),
    }


def prompt_details(record: TurnRecord) -> dict[str, int]:
    """KV that another conversation had left counts as found, though it was new here."""
    shared, disk = record.shared_hit_tokens or 0, record.disk_hit_tokens or 0
    gpu, cpu = (record.gpu_hit_tokens or 0) + shared, record.cpu_hit_tokens or 0
    return {
        "cached_tokens": gpu + cpu + disk,
        "gpu": gpu,
        "cpu": cpu,
        "disk": disk,
        "recomputed": record.recomputed_tokens or 0,
        "new": (record.new_tokens or 0) - shared,
    }


def finish_reason(record: TurnRecord) -> str:
    return "length" if record.finish_reason == "length" else "stop"


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
