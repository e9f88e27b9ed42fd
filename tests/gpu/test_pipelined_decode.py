"""On a GPU: graphs equal eager, two plans in flight equal one, nothing waits but for the tokens."""

from __future__ import annotations

import warnings
from array import array
from functools import cache

import pytest
import torch

from pensieve.core.plan import Row, Sample, StepPlan
from pensieve.core.request import Length, Request, Sampling
from pensieve.device.model import LoadedModel
from pensieve.device.options import TorchOptions
from pensieve.device.worker import TorchWorker
from pensieve.serve.systems.base import WallClock
from tests.simulated import run
from tests.worker.torch.driver import engine_on, random_tokens

from .small import small_model

CHUNK = 32


def model() -> LoadedModel:
    return small_model("llama")


def served(depth: int, graphs: bool) -> tuple[dict[int, list[int]], TorchWorker]:
    options = TorchOptions(depth=depth, graphs=graphs, max_batch_tokens=256, max_batch_requests=12)
    worker = TorchWorker(model(), CHUNK, WallClock(), options=options)
    engine = engine_on(worker, 40, 40, CHUNK, 1024, max_batch_tokens=256, max_batch_requests=12)
    tokens: dict[int, list[int]] = {}
    number = 0
    for turn in (1, 2, 3):
        for name in "abcdefghijk":
            number += 1
            sampling = Sampling(temperature=0.0 if name < "g" else 1.0, top_k=20, top_p=0.9, seed=3)
            prompt = array("i", random_tokens(9 + 7 * (number % 9), number))
            engine.say(Request(number, name, turn, prompt, Length(12 + number % 5), sampling))
        turns = run(engine)
        assert {turn.status for turn in turns.values()} == {"completed"}
        tokens |= {one: list(turn.token_ids) for one, turn in turns.items()}
    return tokens, worker


@cache
def plain() -> dict[int, list[int]]:
    tokens, worker = served(1, graphs=False)
    worker.close()
    return tokens


@pytest.mark.real_device
@pytest.mark.parametrize(("depth", "graphs"), [(1, True), (2, False), (2, True)])
def test_graphs_and_depth_change_no_token(depth: int, graphs: bool) -> None:
    tokens, worker = served(depth, graphs)
    settings = worker.settings()
    worker.close()
    assert settings["depth"] == depth
    if graphs and model().attention.captures:
        assert settings["graphs"] == "on"
    assert tokens == plain()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_launch_waits_for_nothing(temperature: float) -> None:
    """torch reports every synchronising call of a launch; reading the tokens in collect is not one of them."""
    worker = TorchWorker(model(), CHUNK, WallClock(), options=TorchOptions(depth=2, max_batch_requests=4))
    worker.start(40, 0)
    prompt = Row(0, ((0, 40),), tuple(random_tokens(40, 1)), Sample(40))
    worker.launch(StepPlan(0, (prompt,), ((0, 0, (3, 4, 5)),)))
    assert worker.collect(None) is not None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for step in (1, 2):
                sample = Sample(40 + step, key=7, temperature=temperature, top_p=0.9, top_k=20)
                worker.launch(StepPlan(step, (Row(0, ((39 + step, 40 + step),), None, sample),)))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    results = [worker.collect(None) for _ in range(2)]
    worker.close()
    assert all(result is not None and result.error is None for result in results)
    assert not [str(warning.message) for warning in caught if "synchroniz" in str(warning.message)]
