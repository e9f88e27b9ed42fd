"""What clients of the OpenAI API send: chat completions, completions and responses; and the numbers that they get back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from pensieve.core.hint import Hint
from pensieve.core.request import stops_of
from pensieve.errors import ConfigError
from pensieve.serve.record import TurnRecord
from pensieve.serve.server.conversations import LONGEST_NAME
from pensieve.serve.server.dialogue import Tools

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
_ONE, _NO_LOGPROBS = "one reply a request; send several requests", "this engine returns none; leave it out"
_PLAIN = "the model's text comes as it is"


def _only(*values: Any, instead: str) -> AfterValidator:
    """What OpenAI's API has and this server does only in one way: null and these values pass."""

    def check(given: Any) -> Any:
        if given is not None and given not in values:
            raise PydanticCustomError("unsupported", "{text}", {"text": f"It is not supported as given: {instead}"})
        return given

    return AfterValidator(check)


def text_of_parts(content: Any) -> str:
    """The text of a string, or of content parts (text, input_text, output_text). Raises ConfigError for anything else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise ConfigError("Content is a string, or a list of parts.")
    texts = []
    for part in content:
        if part.get("type") not in ("text", "input_text", "output_text", "refusal"):
            raise ConfigError(f"A content part of type {part.get('type')!r} is not supported: the model reads text.")
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise ConfigError("A content part has no text.")
        texts.append(text)
    return "".join(texts)


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
    n: Annotated[int | None, _only(1, instead=_ONE)] = 1
    presence_penalty: Annotated[Real | None, _only(0, instead="leave it out, or 0")] = 0.0
    frequency_penalty: Annotated[Real | None, _only(0, instead="leave it out, or 0")] = 0.0
    logit_bias: Annotated[dict[str, Any] | None, _only({}, instead="leave it out")] = None
    stream_options: dict[str, Any] | None = None

    @property
    def include_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))


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
        text = "" if self.content is None else text_of_parts(self.content)
        return {**self.model_dump(exclude_none=True), "role": role, "content": text}


class ChatBody(_Sampled):
    messages: Annotated[Listed[ChatMessage], Field(min_length=1)]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    logprobs: Annotated[bool | None, _only(False, instead=_NO_LOGPROBS)] = False
    top_logprobs: Annotated[int | None, _only(0, instead=_NO_LOGPROBS)] = None
    tools: Listed[Tool] | None = None
    response_format: Annotated[dict[str, Any] | None, _only({"type": "text"}, instead=_PLAIN)] = None


def _one_prompt(given: Any) -> Any:
    """Of a list of prompts that is one long its only one."""
    if not isinstance(given, list) or not given or isinstance(given[0], int):
        return given
    if len(given) != 1:
        raise PydanticCustomError("unsupported", "One prompt a request; send several requests")
    return given[0]


class CompletionBody(_Sampled):
    prompt: Annotated[str | Listed[int] | Listed[str] | Listed[Listed[int]], AfterValidator(_one_prompt)]
    max_tokens: Tokens | None = 16
    logprobs: Annotated[int | None, _only(instead=_NO_LOGPROBS)] = None
    echo: Annotated[bool | None, _only(False, instead="the prompt is not repeated")] = False
    suffix: Annotated[str | None, _only("", instead="text goes on to the right only")] = None
    best_of: Annotated[int | None, _only(1, instead=_ONE)] = 1
    ignore_eos: bool | None = Field(
        False, description="Go on to max_tokens, whatever tokens end a reply. As vLLM has it."
    )
    return_token_ids: bool | None = Field(False, description="The reply's token ids beside its text. As vLLM has it.")


def _plain_text(text: dict[str, Any] | None) -> dict[str, Any] | None:
    form = (text or {}).get("format") or {"type": "text"}
    if not isinstance(form, dict) or form.get("type") != "text":
        raise PydanticCustomError("unsupported", "{text}", {"text": f"A format is not supported as given: {_PLAIN}"})
    return text


class ResponseBody(_Body):
    input: str | Listed[dict[str, Any]] = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    max_output_tokens: Tokens | None = None
    tools: Listed[Tool] | None = None
    tool_choice: Annotated[Any, ToldAgain] = "auto"
    parallel_tool_calls: bool | None = True
    background: Annotated[
        bool | None, _only(False, instead="responses are made while the client waits; use stream")
    ] = False
    text: Annotated[dict[str, Any] | None, AfterValidator(_plain_text)] = None
    truncation: Literal["auto", "disabled"] | None = "disabled"
    top_logprobs: Annotated[int | None, _only(0, instead=_NO_LOGPROBS)] = None
    seed: int | None = None


class TokenizeBody(BaseModel):
    model_config = ConfigDict(extra="ignore")
    model: str | None = None
    prompt: str | None = None
    messages: Listed[ChatMessage] | None = None


def tools_of(tools: list[Tool] | None) -> Tools | None:
    """Function schemas for the template; the flat form of /v1/responses as that of /v1/chat/completions."""
    plain = (dict(tool.model_extra or {}) if tool.function is None else tool.function for tool in tools or ())
    return [{"type": "function", "function": function} for function in plain] or None


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
