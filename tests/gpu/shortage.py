"""A device that runs out of memory in the middle of serving, in earnest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.clock import WallClock
from pensieve.core.policies.lru import Lru
from pensieve.core.request import Length, Request
from pensieve.core.scheduler.composition import SchedulerSettings
from pensieve.device.model import LoadedModel
from pensieve.device.options import TorchOptions
from pensieve.device.worker import TorchWorker
from pensieve.serve.books.books import Books
from pensieve.serve.record import TurnRecord
from tests.simulated import TalkingEngine, policy_context
from tests.worker.torch.driver import random_tokens

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
    cache = TwoTierCache(policy=Lru(policy_context(8, 40, 40)), chunk_tokens=8, gpu_blocks=40, cpu_blocks=40)
    worker.start(40, 40)
    settings = SchedulerSettings(max_batch_tokens=64, max_batch_requests=4)
    engine = TalkingEngine(
        cache=cache, settings=settings, worker=worker, clock=WallClock(), max_context=512, facts=Books(8)
    )
    prompt = random_tokens(30, 1)

    def ask(number: int) -> TurnRecord:
        engine.say(Request(number, "a", 1, prompt, Length(6)))
        turns = []
        while engine.busy:
            turns += [event.turn for event in engine.step(None) if event.turn is not None]
            cache.check()
        return turns[0]

    for number in (1, 2, 3):
        forward.fails_at = forward.calls + 2
        failed = ask(number)
        assert failed.status == "failed", number
    forward.fails_at = 0
    served = ask(4)
    worker.close()
    return failed, served, list(prompt)
