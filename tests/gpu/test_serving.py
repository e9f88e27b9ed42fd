"""On a GPU: graphs equal eager, two plans in flight equal one, nothing waits but for the tokens; conversations whose KV was
on CPU, dropped, or both; a model in bfloat16; one trial from the command line."""

import os
import sqlite3
import subprocess
import sys
import warnings
from array import array
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from pensieve.core.plan import Row, Sample, StepPlan
from pensieve.core.request import Length, Request, Sampling
from pensieve.device.kernels.base import CapturingBackend
from pensieve.device.model import LoadedModel
from pensieve.device.worker import TorchOptions, TorchWorker
from pensieve.plugins.caches.restore import RestoreMode
from pensieve.serve.systems.base import WallClock
from tests.simulated import run
from tests.worker.torch.driver import engine_on, random_tokens

from .conversations import CHUNK, REQUESTS, TURNS, check_paths, converse, small_model

CHECKOUT = Path(__file__).resolve().parents[2]


def model() -> LoadedModel:
    return small_model("llama")


def served(depth: int, graphs: bool) -> tuple[dict[int, list[int]], TorchWorker]:
    options = TorchOptions(depth=depth, graphs=graphs, max_batch_tokens=256, max_batch_requests=12)
    worker = TorchWorker(model(), 32, WallClock(), options=options)
    engine = engine_on(worker, 40, 40, 32, 1024, max_batch_tokens=256, max_batch_requests=12)
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


@pytest.mark.parametrize(("depth", "graphs"), [(1, True), (2, False), (2, True)])
def test_graphs_and_depth_change_no_token(depth: int, graphs: bool) -> None:
    tokens, worker = served(depth, graphs)
    settings = worker.settings()
    worker.close()
    assert settings["depth"] == depth
    if graphs and isinstance(model().attention, CapturingBackend):
        assert settings["graphs"] == "on"
    assert tokens == plain()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_launch_waits_for_nothing(temperature: float) -> None:
    """torch reports every synchronising call of a launch; reading the tokens in collect is not one of them."""
    worker = TorchWorker(model(), 32, WallClock(), options=TorchOptions(depth=2, max_batch_requests=4))
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


@pytest.mark.parametrize(
    ("name", "mode", "depth", "fused", "device"),
    [
        ("llama", "load", 2, True, "cuda:0"),
        ("llama", "hybrid", 2, True, "cuda:0"),
        ("llama", "recompute", 1, True, "cuda:0"),
        ("gemma2", "hybrid", 2, True, "cuda:0"),
        (
            "llama",
            "load",
            2,
            False,
            "cuda:0",
        ),  # transformers' modules may wait somewhere: then the eager forward serves
        ("llama", "load", 2, True, "cuda:1"),
    ],
)
def test_every_token_is_the_plain_models(name: str, mode: RestoreMode, depth: int, fused: bool, device: str) -> None:
    if device == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    model = small_model(name, CHUNK, device=device, fused=fused)
    check_paths(converse(model, mode, TorchOptions(depth=depth, max_batch_requests=REQUESTS), None, TURNS), mode)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_auto_fits_and_leaves_its_share() -> None:
    options = TorchOptions(max_batch_tokens=256, max_batch_requests=12, memory_share=0.5)
    worker = TorchWorker(model(), 32, WallClock(), options=options)
    worker.start(worker.room(), 0)
    free, total = torch.cuda.mem_get_info()
    worker.close()
    assert 0.35 < 1 - free / total < 0.6


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_a_deep_model_with_random_weights_is_served_by_triton_and_the_fused_forward() -> None:
    model = small_model("deep", dtype="bfloat16")
    assert (model.attention.name, model.attention_note, model.forward_note) == ("triton", "", "")
    assert model.self_check.difference > 0


def test_a_trial_runs_and_records_the_device(tmp_path: Path) -> None:
    environment = {**os.environ, "PENSIEVE_OUTPUTS": str(tmp_path)}
    environment.pop("PYTEST_CURRENT_TEST", None)
    command = [
        sys.executable, str(CHECKOUT / "runners" / "run.py"), "hardware=cuda", "hardware.depth=2", "model=tiny",
        "cache=demo", "workload.users=2", "workload.max_turns=2", "workload.min_turns=2",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    with sqlite3.connect(tmp_path / "results.db") as connection:
        ((status, device, simulated, engine),) = connection.execute(
            "SELECT status, device, simulated, engine FROM trial"
        ).fetchall()
    assert (status, simulated) == ("completed", 0) and device != "cpu" and '"depth": 2' in engine
