"""What clients of the OpenAI API send: chat completions, completions and responses."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

from pensieve.core.request import Hint
from pensieve.errors import ConfigError
from pensieve.serve.server.conversations import LONGEST_NAME
from pensieve.serve.tokenizer import Message

Tools = list[dict[str, Any]]
Tokens = Annotated[int, Field(ge=1, le=2**31 - 1)]
Name = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]

T = TypeVar("T")
Listed = Annotated[list[T], Field(fail_fast=True, max_length=2**20)]
"""What is wrong in it is told once: an error an item takes gigabytes, and minutes in which nobody is served."""


class _Sent(BaseModel):
    """Unknown fields are ignored, as OpenAI's own server does."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class TextPart(_Sent):
    """A part of what is said. The model reads text: no images, no sound."""

    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))


Content = str | Listed[TextPart]


def _joined(content: Content | None) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


class _Body(_Sent):
    """Fields that would change the reply and are not supported have one value, and are refused by name with any other."""

    model: str | None = None
    stream: bool | None = False
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    session_id: Name | None = Field(None, description="The conversation; also as header X-Session-Id.")
    history: Literal["whole", "new"] | None = Field(
        None, description="With a session_id: whether this is the whole conversation or what is new in it."
    )
    keep_alive: Annotated[float, Field(gt=0, le=1e9)] | None = Field(
        None,
        description="Seconds without a turn after which the conversation may be given up. A hint: nothing is pinned.",
    )
    metadata: dict[str, JsonValue] | None = Field(
        None,
        description="Three of its keys are hints to the cache. expected_s: seconds from the reply to the next request. "
        "stop_reason: tool_use or end_turn, if the client knows how the reply will end. tool: its name.",
    )


class _Sampled(_Body):
    stop: str | Annotated[list[str], Field(fail_fast=True, max_length=16)] | None = None
    seed: int | None = None
    n: Literal[1] | None = 1
    presence_penalty: Literal[0] | None = 0
    frequency_penalty: Literal[0] | None = 0
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    stream_options: dict[str, JsonValue] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return tuple(text for text in given if text)


class Tool(_Sent):
    """function: None in the flat form of /v1/responses, whose fields are the tool's own."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, JsonValue]

    type: Literal["function"]
    function: dict[str, JsonValue] | None = None


class ChatMessage(_Sent):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Listed[dict[str, JsonValue]] | None = None
    tool_call_id: str | None = None

    def plain(self) -> Mapping[str, Any]:
        """As templates know it: the content is one string."""
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        return {**self.model_dump(exclude_none=True), "role": role, "content": _joined(self.content)}


Messages = Annotated[Listed[ChatMessage], Field(min_length=1)]


class PlainText(_Sent):
    type: Literal["text"] = "text"


class ChatBody(_Sampled):
    messages: Messages
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    logprobs: Literal[False] | None = False
    top_logprobs: Literal[0] | None = None
    tools: Listed[Tool] | None = None
    response_format: PlainText | None = None


def _one_prompt(given: Any) -> Any:
    """Of a list of prompts that is one long its only one."""
    return given[0] if isinstance(given, list) and len(given) == 1 and not isinstance(given[0], int) else given


class CompletionBody(_Sampled):
    prompt: Annotated[str | Listed[int], BeforeValidator(_one_prompt)]
    max_tokens: Tokens | None = 16
    logprobs: None = None
    echo: Literal[False] | None = False
    suffix: Literal[""] | None = None
    best_of: Literal[1] | None = 1
    ignore_eos: bool | None = Field(
        False, description="Go on to max_tokens, whatever tokens end a reply. As vLLM has it."
    )
    return_token_ids: bool | None = Field(False, description="The reply's token ids beside its text. As vLLM has it.")


class TextFormat(_Sent):
    format: PlainText | None = None


class InputMessage(_Sent):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    def plain(self) -> Message:
        return {"role": "system" if self.role == "developer" else self.role, "content": _joined(self.content)}


class FunctionCall(_Sent):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = ""

    def plain(self) -> Message:
        function = {"name": self.name, "arguments": self.arguments}
        call = {"id": self.call_id, "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}


class FunctionCallOutput(_Sent):
    type: Literal["function_call_output"]
    call_id: str
    output: Content

    def plain(self) -> Message:
        return {"role": "tool", "content": _joined(self.output), "tool_call_id": self.call_id}


class Reasoning(_Sent):
    """What a model thought before is no part of the conversation."""

    type: Literal["reasoning"]


class ResponseBody(_Body):
    input: str | Listed[InputMessage | FunctionCall | FunctionCallOutput | Reasoning] = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    max_output_tokens: Tokens | None = None
    tools: Listed[Tool] | None = None
    tool_choice: JsonValue = "auto"
    parallel_tool_calls: bool | None = True
    background: Literal[False] | None = False
    text: TextFormat | None = None
    truncation: Literal["auto", "disabled"] | None = "disabled"
    top_logprobs: Literal[0] | None = None
    seed: int | None = None

    @property
    def messages(self) -> list[Message]:
        """Its instructions aside. Raises ConfigError where there are none."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        said = [item.plain() for item in self.input if not isinstance(item, Reasoning)]
        if not said:
            raise ConfigError("input is empty; send a string, or at least one message.")
        return said


class TokenizeBody(_Sent):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None


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
