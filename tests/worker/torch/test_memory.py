"""Memory that ends: at start one sentence with the numbers, in flight the requests of one step, and the next ones go on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pensieve.core.request import Length, Request
from pensieve.device.memory import largest_rows
from pensieve.device.options import TorchOptions
from pensieve.device.worker import TorchWorker
from pensieve.errors import HardwareMissing
from pensieve.serve.systems.base import WallClock

from .driver import engine_on, plain_generate, random_tokens, served


class Stumbling:
    """A forward that raises at the calls it is told to."""

    name = "stumbling"

    def __init__(self, model, failing, error=torch.OutOfMemoryError):
        self._forward, self._error = model.forward, error
        self.failing, self.calls = failing, 0

    def __call__(self, iteration, wanted):
        self.calls += 1
        logits = self._forward(iteration, wanted)  # K and V are written by then
        if self.calls in self.failing:
            raise self._error("Tried to allocate 2.00 GiB.\nmany more lines")
        return logits


@pytest.mark.parametrize("call", [1, 2])
def test_out_of_memory_at_start_is_a_sentence_and_frees_everything(llama, call):
    forward = Stumbling(llama, {call})
    worker = TorchWorker(replace(llama, forward=forward), 8, WallClock())
    with pytest.raises(HardwareMissing, match="16 GPU blocks of 8 tokens") as error:
        worker.start(16, 4)
    assert "lower scheduler.max_batch_tokens or cache.gpu" in str(error.value)
    assert "\n" not in str(error.value)
    assert worker.settings()["gpu_pool_bytes"] == 0
    forward.failing.clear()
    assert worker.start(16, 4).settings["gpu_pool_bytes"] > 0


def started(model, forward, depth):
    worker = TorchWorker(replace(model, forward=forward), 8, WallClock(), options=TorchOptions(depth=depth))
    return engine_on(worker, 40, 40, max_batch_tokens=64, max_batch_requests=4)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("after", [1, 3])
def test_in_flight_it_fails_the_step_and_the_next_requests_are_exact(llama, depth, after, error):
    """In the prefill, and in the middle of decoding (at depth 2 with a plan launched behind it)."""
    forward = Stumbling(llama, set(), error)
    engine = started(llama, forward, depth)
    first, second = random_tokens(20, 1), random_tokens(9, 2)
    before = served(engine, Request(1, "a", 1, first, Length(5)))[1]
    forward.failing = {forward.calls + after}
    failed = served(engine, Request(2, "a", 2, second, Length(6)), Request(3, "b", 1, second, Length(6)))
    assert {turn.status for turn in failed.values()} == {"failed"}
    said = failed[2].error or ""
    assert ("ran out of memory" in said) == (error is torch.OutOfMemoryError)
    assert "2.00 GiB" in said
    assert "\n" not in said
    assert engine.facts.counts.failed_steps == 1
    turns = served(engine, Request(4, "a", 2, second, Length(6)), Request(5, "c", 1, first, Length(4)))
    history = [*first, *before.token_ids, *second]
    assert list(turns[4].token_ids) == plain_generate(llama, history, 6)
    assert list(turns[5].token_ids) == plain_generate(llama, first, 4)
    assert turns[4].history_tokens == 24


def test_copies_that_fail_fail_their_step(llama, monkeypatch):
    engine = started(llama, llama.forward, 2)
    worker = engine.worker
    with monkeypatch.context() as patch:

        def none_left(copies):
            raise torch.OutOfMemoryError("no staging buffer")

        patch.setattr(worker.transfer, "swap_in", none_left)
        turn = served(engine, Request(1, "a", 1, random_tokens(20, 1), Length(5)))[1]
    assert (turn.status, "no staging buffer" in (turn.error or "")) == ("failed", True)
    turn = served(engine, Request(2, "a", 1, random_tokens(20, 1), Length(5)))[2]
    assert list(turn.token_ids) == plain_generate(llama, random_tokens(20, 1), 5)


# -- how much fits ------------------------------------------------------------------------------------------------------


def test_the_largest_iterations_reach_every_bound():
    long, many = largest_rows(1000, 64, 400)
    assert [row.positions for row in long] == [400, 400, 200]
    assert len(many) == 64
    assert sum(row.positions for row in many) <= 1000
    assert all(row.sample for row in (*long, *many))
    assert [row.positions for row in largest_rows(8, 64, 400)[1]] == [1] * 8
