"""What conversations say reaches a chat model in its own template, and ends each reply once."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from pensieve.core.request import Free
from pensieve.lab.workload.base import WorkloadContext
from pensieve.lab.workload.chat import ChatWorkload
from pensieve.serve.record import TurnRecord
from pensieve.serve.tokenizer import ChatTemplate, HubTokenizer
from tests.chat import CHATML, dialogue, save_tokenizer
from tests.scripted import context


def reading(tokenizer: HubTokenizer) -> WorkloadContext:
    return replace(context(force_lengths=False), vocab=300, encode=tokenizer.encode, chat=ChatTemplate(tokenizer))


@pytest.fixture
def chatml(tmp_path: Path) -> HubTokenizer:
    return HubTokenizer(save_tokenizer(tmp_path, CHATML))


@pytest.mark.parametrize("ended", [True, False])
def test_the_token_that_ends_a_reply_stands_there_once(chatml: HubTokenizer, ended: bool) -> None:
    workload = ChatWorkload(
        reading(chatml), conversations=1, min_turns=2, max_turns=2, max_new_tokens=5, warmup_turns=4, pressure=0, free=True
    )  # fmt: skip
    (arrival,) = [one for one in workload.start() if one.request.session == "warmup-0"]
    end = min(chatml.eos_ids)
    reply = array("i", [*chatml.encode("on"), *([end] if ended else [])])
    turn = TurnRecord(arrival.request.session, turn=1, phase="warmup", finished_s=1.0, token_ids=reply)
    turn.finish_reason = "eos" if ended else "length"
    (following,) = workload.on_finished(turn)
    assert isinstance(following.request.output, Free)
    said = [*arrival.due().prompt, *reply, *following.due().prompt]
    chat = ChatTemplate(chatml)
    opening = chatml.decode(arrival.due().prompt).partition("user\n")[2].partition("\nassistant")[0]
    asked = chatml.decode(following.due().prompt).partition("user\n")[2].partition("\nassistant")[0]
    assert said == chat.prompt(dialogue(opening, "on", asked))


def test_other_models_read_lines_behind_the_token_that_texts_begin_with(tmp_path: Path) -> None:
    """The same lines with a tokenizer as without one."""
    tokenizer = HubTokenizer(save_tokenizer(tmp_path, begins=True))
    spoken, plain = reading(tokenizer), replace(reading(tokenizer), chat=None)
    for first in (True, False):
        with_tokenizer, lines = (list(one.message("Hello", first)) for one in (spoken, plain))
        assert with_tokenizer == ([*tokenizer.begin] if first else []) + lines
    assert tokenizer.decode(spoken.message("Hello", False)) == "\nUser: Hello\nAssistant:"
