"""Replayed decode iterations say what the eager forward says, at every batch size, as batches grow and shrink."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.policies.lru import Lru
from pensieve.core.request import Length, Request, Sampling
from pensieve.core.scheduler.scheduler import SchedulerSettings
from pensieve.device.graphs import buckets_up_to
from pensieve.device.model import LoadedModel
from pensieve.device.options import TorchOptions
from pensieve.device.worker import TorchWorker
from pensieve.serve.systems.profiling import swap_in, swap_out
from tests.exact import CheckedEngine
from tests.simulated import policy_context

from .driver import Driver, random_tokens
from .standing import Tracer, capturing_model

model_of = cache(capturing_model)


def driver_of(model: LoadedModel, recorder: Tracer | None, requests: int = 12) -> Driver:
    options = TorchOptions(recorder=recorder, max_batch_requests=requests)
    return Driver(model, gpu_blocks=160, options=options)


def test_buckets_pad_by_seven_rows_at_most() -> None:
    assert buckets_up_to(1) == (1,)
    assert buckets_up_to(3) == (1, 2, 3)
    assert buckets_up_to(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert buckets_up_to(20) == (1, 2, 4, 8, 16, 20)


@pytest.mark.parametrize(("name", "fused"), [("llama", True), ("gemma2", True), ("gpt2", True), ("llama", False)])
def test_replayed_steps_equal_the_plain_model(name: str, fused: bool) -> None:
    """Conversations of different lengths join one by one and leave again: every bucket, with and without padding."""
    recorder = Tracer()
    driver = driver_of(model_of(name, fused), recorder)
    assert recorder.recorded == len(buckets_up_to(12)), "all recorded at start"
    for slot in range(12):
        driver.step(driver.prompt_row(slot, random_tokens(3 + 13 * (slot % 5), slot)))
    before = recorder.replayed
    sizes = [1, 2, 3, 5, 8, 9, 12, 7, 12, 4, 1]
    for size in sizes:
        driver.step(*[driver.decode_row(slot) for slot in range(12 - size, 12)])
        driver.keep_logits(*range(12 - size, 12))
    driver.check_kept()
    assert recorder.replayed == before + len(sizes), "nothing was left to the eager forward"
    assert recorder.recorded == len(buckets_up_to(12)), "and nothing was recorded again"


def test_replays_and_eager_steps_alternate() -> None:
    """A prefill beside decodes is eager; single positions of a prompt that are not sampled are replayed with the others."""
    recorder = Tracer()
    driver = driver_of(model_of("llama"), recorder, requests=3)
    for slot, length in enumerate((20, 33, 9)):
        driver.step(driver.prompt_row(slot, random_tokens(length, slot)))
    before = recorder.replayed
    driver.step(driver.decode_row(0), driver.prompt_row(1, random_tokens(17, 9)))
    assert recorder.replayed == before
    driver.tokens[2].extend(random_tokens(2, 5))
    known = len(driver.tokens[2])
    for start in range(known - 3, known):
        driver.step(driver.decode_row(0), driver.row(2, ((start, start + 1),), sample=start == known - 1))
        driver.check_logits(0)
    driver.check_logits(2)
    assert recorder.replayed == before + 3


def test_a_replay_waits_for_what_is_loaded() -> None:
    recorder = Tracer()
    driver = driver_of(model_of("llama"), recorder, requests=1)
    driver.step(driver.prompt_row(0, random_tokens(30, 1)))
    old = [block for block in driver.tables[0] if block is not None]
    homes = tuple(range(len(old)))
    driver.perform(moves=[swap_out(1, tuple(old), homes)])
    for chunk in range(len(old)):
        driver.release(0, chunk)
    row = driver.decode_row(0)
    deltas = driver.allocate(0, len(driver.tokens[0]))
    new = tuple(block for _, _, (block,) in deltas[: len(old)])
    before = recorder.replayed
    result = driver.perform([row], deltas, moves=[swap_in(2, homes, new)])
    assert recorder.replayed == before + 1
    driver.tokens[0].append(result.tokens[0])
    driver.check_logits(0)


def test_padding_writes_to_a_block_of_its_own() -> None:
    driver = driver_of(model_of("llama"), Tracer(), requests=4)
    tensors = driver.worker.tensors
    assert tensors.gpu_blocks == 161, "the last one is nobody's"
    tensors.gpu.fill_(float("nan"))
    for slot in range(3):
        driver.step(driver.prompt_row(slot, random_tokens(5, slot)))
    driver.step(*[driver.decode_row(slot) for slot in range(3)])
    owned = {block for table in driver.tables.values() for block in table}
    written = {int(block) for block in torch.isfinite(tensors.gpu).flatten(2).any(-1).any(0).nonzero()}
    assert written == owned | {160}


def test_settings_say_what_runs() -> None:
    model = model_of("llama")
    worker = driver_of(model, Tracer(), requests=2).worker
    assert (worker.settings()["graphs"], worker.settings()["graph_buckets"]) == ("on", [1, 2])
    off = Driver(model, options=TorchOptions(recorder=Tracer(), graphs=False)).worker
    assert (off.settings()["graphs"], off.tensors.gpu_blocks) == ("off", 96)
    assert TorchWorker(model, 8, off._clock).settings()["graphs"] == "off"


@pytest.mark.parametrize("depth", [1, 2])
def test_an_engine_on_graphs_serves_every_token_of_the_plain_model(depth: int) -> None:
    """Swaps, recomputation, sampling and suspension under pressure; free blocks hold NaN."""
    recorder = Tracer()
    cache = TwoTierCache(policy=Lru(policy_context(8, 24, 12)), chunk_tokens=8, gpu_blocks=24, cpu_blocks=12)
    settings = SchedulerSettings(max_batch_tokens=64, max_batch_requests=6)
    options = TorchOptions(depth=depth, recorder=recorder, max_batch_tokens=64, max_batch_requests=6)
    engine = CheckedEngine(model_of("llama"), cache, settings, 512, options=options)
    number = 0
    for turn in (1, 2, 3):
        for name in "abcdef":
            number += 1
            sampling = Sampling(temperature=0.0 if name < "d" else 1.0, top_k=20, top_p=0.9, seed=3)
            engine.say(Request(number, name, turn, random_tokens(5 + number % 7, number), Length(6), sampling))
        engine.run()
    assert engine.paths.turns == 18
    assert recorder.replayed > 20
    assert engine.paths.cpu_restore > 0
