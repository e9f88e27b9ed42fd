"""What clients of the OpenAI API send: chat completions, completions and responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

from pensieve.core.request import Hint
from pensieve.errors import ConfigError
from pensieve.serve.server.conversations import LONGEST_NAME, Message

Tools = list[dict[str, Any]]
Tokens = Annotated[int, Field(ge=1, le=2**31 - 1)]
Name = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]

T = TypeVar("T")
Listed = Annotated[list[T], Field(fail_fast=True, max_length=2**20)]
"""What is wrong in it is told once: an error an item takes gigabytes, and minutes in which nobody is served."""


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


class _Sent(BaseModel):
    """Unknown fields are ignored, as OpenAI's own server does."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


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
    stream_options: dict[str, Any] | None = None

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
    content: str | Listed[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: Listed[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def plain(self) -> Mapping[str, Any]:
        """As templates know it: the content is one string."""
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        text = "" if self.content is None else text_of_parts(self.content)
        return {**self.model_dump(exclude_none=True), "role": role, "content": text}


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


class ResponseBody(_Body):
    input: str | Listed[dict[str, Any]] = ""
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


def messages_of(given: str | list[dict[str, Any]]) -> list[Message]:
    """Convert input items of /v1/responses to messages. Raises ConfigError for items that are no text."""
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
