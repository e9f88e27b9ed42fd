"""What a step reports, and what it leaves alone. Memory that ends: at start one sentence with the numbers, in flight the
requests of one step, and the next ones go on. On a device in error for good steps fail with a sentence."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from pensieve.core.plan import Moved
from pensieve.core.request import Length, Request
from pensieve.device.worker import TorchOptions, TorchWorker, largest_rows
from pensieve.errors import HardwareMissing
from pensieve.serve.systems.base import WallClock
from pensieve.serve.systems.profiling import swap_out

from .driver import Hand, engine_on, plain_generate, plain_logits, random_tokens, served, tiny_model


def test_a_step_reports_times_and_margins(llama):
    hand = Hand(llama, keep_logits=True)
    result = hand.step(moves=(swap_out(3, (0,), (1,)),))
    assert (result.moved, result.tokens, result.ended_ns, result.compute_ns) == ((Moved(3),), {}, None, 0)
    assert result.stall_ns > 0
    before = hand.worker._clock.now_ns()
    result = hand.step(hand.prompt_row(4, 12), tables=((4, 0, (3, 4)),))
    top = torch.topk(hand.worker.last_logits[4], 2)
    assert result.tokens == {4: int(top.indices[0])}
    assert result.margins[4] == pytest.approx(float(top.values[0] - top.values[1]), abs=1e-6)
    assert before < result.ended_ns <= hand.worker._clock.now_ns()
    assert 0 < result.compute_ns <= result.ended_ns - before
    assert (result.h2d_bytes, result.d2h_bytes, result.stall_ns) == (0, 0, 0)


@pytest.mark.parametrize(("attention", "value"), [("reference", float("inf")), ("auto", float("nan"))])
def test_a_row_whose_logits_are_not_finite_leaves_the_others_exact(attention, value):
    """Long and short contexts and a prefill beside it: of each step the tokens are those of a batch without the row. What it
    left in its blocks is not read by who gets them next."""
    hand = Hand(tiny_model("llama", attention=attention), blocks=50, keep_logits=True)
    hand.worker.tensors.gpu.fill_(float("nan"))
    lengths = {0: 12, 1: 70, 2: 11}
    known = {slot: hand.prompt(slot, length, 1 + 12 * slot) for slot, length in lengths.items()}

    def exact(*slots):
        """The last step's logits of these slots are transformers', over all that is known of each."""
        for slot in slots:
            expected = plain_logits(hand.worker.model, known[slot])[-1]
            assert float((hand.worker.last_logits[slot] - expected).abs().max()) <= 1e-4

    hand.worker.tensors.gpu[:, 1] = value
    decodes, prompt = (hand.decode(length, slot) for slot, length in lengths.items()), hand.prompt_row(3, 9)
    result = hand.step(*decodes, prompt, tables=((3, 0, (40, 41)),))
    assert (result.not_finite, sorted(result.tokens)) == ((0,), [1, 2, 3])
    assert set(result.margins) == set(result.tokens)
    known[3] = list(prompt.tokens)
    exact(1, 2, 3)
    known[1].append(result.tokens[1])
    row = hand.prompt_row(4, 13)
    known[4] = list(row.tokens)
    hand.step(row, hand.decode(71, 1), tables=((4, 0, (1, 2)),))
    exact(1, 4)


# -- what fails -------------------------------------------------------------------------------------------------------------


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
            self.held = weakref.ref(logits)
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


@pytest.mark.parametrize(("depth", "after", "error"), [(1, 1, RuntimeError), (2, 3, torch.OutOfMemoryError)])
def test_in_flight_it_fails_the_step_and_the_next_requests_are_exact(llama, depth, after, error):
    """In the prefill, and in the middle of decoding (at depth 2 with a plan launched behind it)."""
    forward = Stumbling(llama, set(), error)
    worker = TorchWorker(replace(llama, forward=forward), 8, WallClock(), options=TorchOptions(depth=depth))
    engine = engine_on(worker, 40, 40, max_batch_tokens=64, max_batch_requests=4)
    first, second = random_tokens(20, 1), random_tokens(9, 2)
    before = served(engine, Request(1, "a", 1, first, Length(5)))[1]
    forward.failing = {forward.calls + after}
    failed = served(engine, Request(2, "a", 2, second, Length(6)), Request(3, "b", 1, second, Length(6)))
    assert {turn.status for turn in failed.values()} == {"failed"}
    said = failed[2].error
    assert ("ran out of memory" in said) == (error is torch.OutOfMemoryError)
    assert "2.00 GiB" in said and "\n" not in said
    assert engine.facts.counts.failed_steps == 1
    turns = served(engine, Request(4, "a", 2, second, Length(6)), Request(5, "c", 1, first, Length(4)))
    history = [*first, *before.token_ids, *second]
    assert list(turns[4].token_ids) == plain_generate(llama, history, 6)
    assert list(turns[5].token_ids) == plain_generate(llama, first, 4)
    assert turns[4].history_tokens == 24


def test_the_largest_iterations_reach_every_bound():
    long, many = largest_rows(1000, 64, 400)
    assert [row.positions for row in long] == [400, 400, 200]
    assert [row.positions for row in many] == 64 * [1000 // 64]
    assert all(row.sample for row in (*long, *many))
    assert [row.positions for row in largest_rows(8, 64, 400)[1]] == [1] * 8


class Device:
    """A link and the marks in it; from `fails` on each answer is an error."""

    error, fails = None, False

    def _ask(self, *given):
        if self.fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ...")
        return self

    computed = hold_compute = wait = synchronize = close = _ask

    def enqueue(self, haul, inward, after=()):
        return [self._ask()] * haul.layers

    def reached(self):
        return self._ask() is None

    def stalled_ns(self):
        return 0


def test_steps_fail_with_a_sentence_and_copies_under_way_fail_once(llama, monkeypatch):
    device = Device()
    hand = Hand(llama, link=device)
    row = hand.prompt_row(0, 12)
    assert hand.perform(row, tables=((0, 0, (3, 4)),), moves=(swap_out(5, (30,), (1,)),)).error is None

    def breaks(batch):
        device.fails = True
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(hand.worker, "_forward", breaks)
    result = hand.perform(row, moves=(swap_out(6, (31,), (2,)),))
    assert "illegal memory access" in result.error and "\n" not in result.error
    assert result.moved == (Moved(5, ok=False),), "those of the failed plan are void, and not reported"
    later = hand.perform(row, moves=(swap_out(7, (31,), (2,)),))
    assert "illegal memory access" in later.error and later.moved == ()
    assert hand.worker.collect(None) is None
    hand.worker.close()


def test_a_failed_step_keeps_no_activations(llama):
    """Else the memory that was too little stays taken until the garbage collector comes by, and the next steps fail too."""
    forward = Stumbling(llama, set())
    hand = Hand(replace(llama, forward=forward))
    forward.failing = {forward.calls + 1}
    gc.collect()
    gc.disable()
    try:
        hand.launch(hand.prompt_row(0, 4), tables=((0, 0, (3,)),))
        assert forward.held() is None
        result = hand.worker.collect(None)
    finally:
        gc.enable()
    assert "ran out of memory" in result.error
    hand.close()
