"""LMBenchmark: ShareGPT conversations with the length of each answer in tokens, or whole prompts with an output length."""

from __future__ import annotations

from dataclasses import replace

from pensieve.lab.workload.formats import sharegpt
from pensieve.lab.workload.formats.reading import Malformed, Reader, Row, text, whole
from pensieve.lab.workload.recording import Call, Conversation, Recording, Text

RULE = (
    "An entry with `conversations` is one, as in ShareGPT; its answers have `num_tokens` tokens where that is given. An "
    "entry with `input` is a request with its whole prompt. It continues the conversation whose last prompt is its prefix, "
    "the longest of several, and otherwise opens one."
)
_KEY = 32  # leading characters by which prompts that may continue each other are found


def read(reader: Reader) -> Recording:
    whole_prompts: list[list[Call]] = []
    begun: dict[str, list[list[Call]]] = {}  # conversations by how their first prompt begins
    talks: list[tuple[str, tuple[Call, ...]]] = []
    for name, calls, prompt in reader.json_list(_entry):
        if prompt is None:
            talks.append((name, calls))
            continue
        keys = {prompt[:length] for length in range(1, _KEY + 1)}  # a short prompt is all of its key
        alike = [one for key in keys for one in begun.get(key, ())]
        before = [one for one in alike if len(prompt) > len(_text(one[-1])) and prompt.startswith(_text(one[-1]))]
        if before:
            max(before, key=lambda one: len(_text(one[-1]))).extend(calls)
        else:
            whole_prompts.append(list(calls))
            begun.setdefault(prompt[:_KEY], []).append(whole_prompts[-1])
    recording = sharegpt.recording(reader, talks)
    asked = [Conversation(f"prompt-{place}", tuple(calls)) for place, calls in enumerate(whole_prompts)]
    return replace(recording, format="lmbenchmark", rule=RULE, conversations=recording.conversations + tuple(asked))


def _entry(entry: Row) -> tuple[str, tuple[Call, ...], str | None]:
    if "input" not in entry:
        return (*sharegpt.parse(entry, counted="num_tokens"), None)
    prompt = text(entry, "input")
    if not prompt:
        raise Malformed("input is empty")
    return "", (Call(Text(prompt), max(1, whole(entry, "output_length")), continues=False),), prompt


def _text(call: Call) -> str:
    assert isinstance(call.content, Text)
    return call.content.text
