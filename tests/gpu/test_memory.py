"""On a GPU: what memory allows is found out, and running out of it is a sentence that the next requests do not notice."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from pensieve.core.request import Length, Request
from pensieve.device.model import LoadedModel
from pensieve.device.worker import TorchOptions, TorchWorker
from pensieve.serve.record import TurnRecord
from pensieve.serve.systems.base import WallClock
from tests.worker.torch.driver import engine_on, plain_logits, random_tokens, served

from .small import small_model

_MORE_THAN_ANY = 2**50


class Hungry:
    """The model's own forward, which at some calls asks for more memory than there is, with `bytes_held` in hand."""

    name = "hungry"

    def __init__(self, model: LoadedModel, bytes_held: int) -> None:
        self._forward, self._device, self._bytes_held = model.forward, model.device, bytes_held
        self.calls, self.fails_at = 0, 0

    def __call__(self, iteration: Any, wanted: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        logits = self._forward(iteration, wanted)
        if self.calls == self.fails_at:
            held = torch.empty(self._bytes_held, dtype=torch.uint8, device=self._device)
            torch.empty(_MORE_THAN_ANY, dtype=torch.uint8, device=held.device)
        return logits


def fail_and_go_on(model: LoadedModel, depth: int, bytes_held: int) -> tuple[TurnRecord, TurnRecord, list[int]]:
    """The turn that met the shortage, the same one asked again, and its whole prompt. Steps fail three times over, so that
    a failure that kept its memory would leave none."""
    forward = Hungry(model, bytes_held)
    options = TorchOptions(depth=depth, graphs=False)
    worker = TorchWorker(replace(model, forward=forward), 8, WallClock(), options=options)
    engine = engine_on(worker, 40, 40, max_batch_tokens=64, max_batch_requests=4)
    prompt = random_tokens(30, 1)

    def ask(number: int) -> TurnRecord:
        return served(engine, Request(number, "a", 1, prompt, Length(6)))[number]

    for number in (1, 2, 3):
        forward.fails_at = forward.calls + 2
        failed = ask(number)
        assert failed.status == "failed", number
    forward.fails_at = 0
    whole = ask(4)
    worker.close()
    return failed, whole, list(prompt)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_shortage_in_flight_fails_its_step_alone(depth: int) -> None:
    """The failing forwards hold a quarter of what is free each; without the garbage collector none of it may stay."""
    model = small_model("llama", 8)
    torch.cuda.empty_cache()
    before, held = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0] // 4
    gc.collect()
    gc.disable()
    try:
        failed, served, prompt = fail_and_go_on(model, depth, held)
        kept = torch.cuda.memory_allocated() - before
    finally:
        gc.enable()
    assert kept < held // 2
    assert "ran out of memory" in (failed.error or "") and "are free" in (failed.error or "")
    tokens = [*prompt, *served.token_ids]
    best = plain_logits(model, tokens[:-1])[len(prompt) - 1 :].argmax(dim=1)
    assert best.tolist() == list(served.token_ids)


def test_auto_fits_and_leaves_its_share() -> None:
    model = small_model("llama")
    options = TorchOptions(max_batch_tokens=256, max_batch_requests=12, memory_share=0.5)
    worker = TorchWorker(model, 32, WallClock(), options=options)
    blocks = worker.room()
    worker.start(blocks, 0)
    free, total = torch.cuda.mem_get_info()
    worker.close()
    assert 0.35 < 1 - free / total < 0.6
