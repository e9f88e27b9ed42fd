"""Replayed decode iterations say what the eager forward says, at every batch size, as batches grow and shrink."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.policies.lru import Lru
from pensieve.core.request import Length, Request, Sampling
from pensieve.core.scheduler.scheduler import SchedulerSettings
from pensieve.device.batch import Batch
from pensieve.device.fused import build_fused
from pensieve.device.graphs import Work, buckets_up_to
from pensieve.device.kernels.base import Plan, Scores
from pensieve.device.kernels.reference import ReferenceBackend
from pensieve.device.model import LoadedModel
from pensieve.device.worker import TorchOptions
from tests.exact import CheckedEngine
from tests.simulated import policy_context

from .driver import Driver, random_tokens, tiny_model


class Tracer:
    """Records the operations of `work` with the tensors they touched, as a CUDA graph records kernels and addresses: a
    replay runs no Python of the model, and sees a changed input only where it was changed in place."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def record(self, work: Work) -> Work:
        self.recorded += 1
        work()
        graph = make_fx(work)()

        def replay() -> torch.Tensor:
            self.replayed += 1
            result: torch.Tensor = graph()
            return result

        return replay


class TensorPlan(Plan):
    """Single positions over block tables in plain tensor operations of fixed shape."""

    def __init__(self, pool: torch.Tensor, chunk_tokens: int, rows: int, max_blocks: int) -> None:
        self._chunk = chunk_tokens
        self._tables = torch.zeros(rows, max_blocks, dtype=torch.int64)
        self._lengths = torch.zeros(rows, dtype=torch.int64)

    def update(self, batch: Batch) -> None:
        self._lengths.zero_()
        for row, span in enumerate(batch.spans):
            self._tables[row, : len(span.blocks)] = torch.from_numpy(span.blocks)
            self._lengths[row] = span.stop

    def attend(
        self, pool: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, how: Scores
    ) -> torch.Tensor:
        scaling, window, softcap = how
        rows, heads, head_dim = queries.shape
        kv_heads, chunk = pool.shape[2], self._chunk
        places = (self._tables[:, :, None] * chunk + torch.arange(chunk)).flatten(1)  # [rows, width]
        position = torch.arange(places.shape[1])[None]
        seen = position < self._lengths[:, None]
        if window is not None:
            seen = seen & (position >= self._lengths[:, None] - window)
        kv = pool.index_select(0, places.flatten()).view(rows, -1, 2, kv_heads, head_dim)
        kv = torch.where(seen[:, :, None, None, None], kv, 0.0)
        q = queries.view(rows, kv_heads, -1, head_dim) * (head_dim**-0.5 if scaling is None else scaling)
        scores = torch.einsum("rkgd,rwkd->rkgw", q, kv[:, :, 0])
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        weights = torch.softmax(scores.masked_fill(~seen[:, None, None, :], -1e30), dim=-1)
        return torch.einsum("rkgw,rwkd->rkgd", weights, kv[:, :, 1]).reshape(rows, heads, head_dim)


class TensorBackend(ReferenceBackend):
    """The reference, and standing plans beside it."""

    name = "tensors"

    def standing(self, pool: torch.Tensor, chunk_tokens: int, rows: int, max_blocks: int) -> TensorPlan:
        return TensorPlan(pool, chunk_tokens, rows, max_blocks)


@cache
def model_of(name: str, fused: bool = True) -> LoadedModel:
    """A tiny model that attends through TensorBackend; unpacked, since packed weights cannot be traced."""
    model = tiny_model(name, fused=fused)
    forward = build_fused(model.module, pack=False) if fused else model.forward
    assert not isinstance(forward, str)
    return replace(model, forward=forward, attention=TensorBackend())


def driver_of(model: LoadedModel, recorder: Tracer | None, requests: int = 12) -> Driver:
    options = TorchOptions(recorder=recorder, max_batch_requests=requests)
    return Driver(model, gpu_blocks=160, options=options)


def test_buckets_pad_by_seven_rows_at_most() -> None:
    sizes = {1: (1,), 3: (1, 2, 3), 20: (1, 2, 4, 8, 16, 20), 64: (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)}
    assert {most: buckets_up_to(most) for most in sizes} == sizes


@pytest.mark.parametrize(("name", "fused"), [("gemma2", True), ("gpt2", True), ("llama", False)])
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


def test_padding_writes_to_a_block_of_its_own() -> None:
    off = Driver(model_of("llama"), options=TorchOptions(recorder=Tracer(), graphs=False)).worker
    assert (off.settings()["graphs"], off.tensors.gpu_blocks) == ("off", 96)
    driver = driver_of(model_of("llama"), Tracer(), requests=4)
    settings, tensors = driver.worker.settings(), driver.worker.tensors
    assert (settings["graphs"], settings["graph_buckets"]) == ("on", [1, 2, 4])
    assert tensors.gpu_blocks == 161, "the last one is nobody's"
    tensors.gpu.fill_(float("nan"))
    for slot in range(3):
        driver.step(driver.prompt_row(slot, random_tokens(5, slot)))
    driver.step(*[driver.decode_row(slot) for slot in range(3)])
    owned = {block for table in driver.tables.values() for block in table}
    written = {int(block) for block in torch.isfinite(tensors.gpu).flatten(2).any(-1).any(0).nonzero()}
    assert written == owned | {160}


def test_an_engine_on_graphs_serves_every_token_of_the_plain_model() -> None:
    """Swaps, recomputation, sampling and suspension under pressure; free blocks hold NaN."""
    recorder = Tracer()
    cache = TwoTierCache(policy=Lru(policy_context(8, 24, 12)), chunk_tokens=8, gpu_blocks=24, cpu_blocks=12)
    settings = SchedulerSettings(max_batch_tokens=64, max_batch_requests=6)
    options = TorchOptions(depth=2, recorder=recorder, max_batch_tokens=64, max_batch_requests=6)
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
