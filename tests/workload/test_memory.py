"""A workload that the machine's memory cannot hold is refused before it is written, with the memory that it would take."""

import tracemalloc
from dataclasses import replace

import pytest

from pensieve.errors import ConfigError
from pensieve.lab.replay import replay
from pensieve.lab.workload.agents import AgentsWorkload
from pensieve.lab.workload.base import TURN_BYTES
from pensieve.lab.workload.chat import ChatWorkload
from pensieve.lab.workload.hotness import HotnessWorkload
from pensieve.lab.workload.sharegpt import sharegpt_workload
from tests.scripted import ScriptedSystem, context

FREE = 8 * 2**30


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (ChatWorkload, {"conversations": 10**9}),
        (ChatWorkload, {"users": 10**9}),
        (ChatWorkload, {"pressure": 1e9}),
        (HotnessWorkload, {"users": 10**9}),
        (AgentsWorkload, {"agents": 10**9}),
        (sharegpt_workload, {"conversations": 10**9}),
        (sharegpt_workload, {"users": 10**9}),
    ],
)
def test_more_than_memory_holds_is_refused_with_what_it_would_take(make, field):
    [name] = field
    here = replace(context(gpu_tokens=4096), memory_bytes=FREE)
    with pytest.raises(
        ConfigError, match=rf"workload\.{name} asks for [\d,]+ conversations.* TiB of memory, and 8\.0 GiB"
    ):
        make(here, **field)


@pytest.mark.parametrize("make", [ChatWorkload, HotnessWorkload, AgentsWorkload, sharegpt_workload])
def test_what_fits_is_not_refused(make):
    make(replace(context(), memory_bytes=2**26))


def test_a_turn_takes_at_least_the_memory_that_is_said():
    """What is refused could not have run: a replay's memory grows with its turns by no less, and not by many times more."""

    def peak(conversations):
        tracemalloc.start()
        try:
            workload = ChatWorkload(
                context(), conversations=conversations, min_turns=4, max_turns=4, pressure=0, request_interval=0
            )
            replay(ScriptedSystem(), workload, on_batch=lambda turns: None, keep_tokens=False)  # as a trial does it
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(8)  # what is loaded once
    a_turn = (peak(90) - peak(30)) / (60 * 4)
    assert TURN_BYTES < a_turn < 4 * TURN_BYTES, a_turn
