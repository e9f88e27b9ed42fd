"""A device that runs out of memory in the middle of serving, in earnest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from pensieve.core.request import Length, Request
from pensieve.device.model import LoadedModel
from pensieve.device.options import TorchOptions
from pensieve.device.worker import TorchWorker
from pensieve.serve.record import TurnRecord
from pensieve.serve.systems.base import WallClock
from tests.worker.torch.driver import engine_on, random_tokens, served

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
