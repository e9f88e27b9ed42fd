"""Profiles a started worker through the plans it performs anyway, once for each device and model in a process."""

import json
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from pensieve.core.machine import Clock, Worker
from pensieve.core.plan import CPU, GPU, Move, Row, Sample, StepPlan
from pensieve.errors import WorkerError
from pensieve.sim.profile import Profile, measure
from pensieve.units import ceil_div

_TRANSFER_BLOCKS = 64
_TRANSFER_ROUNDS = 4
DECODES = 12
_known: dict[str, Profile] = {}


def profile_of(
    worker: Worker,
    clock: Clock,
    chunk_tokens: int,
    pool_tokens: int,
    max_context: int,
    transfer_blocks: int,
    where: Mapping[str, Any],
    batch_tokens: int,
) -> Profile:
    """Measured before the first request, in the blocks of the pools that the requests will overwrite.

    All baselines of a sweep share one profile, so that their policies decide by the same costs. pool_tokens: what the GPU
    tier holds; with the model's max_context it bounds the contexts that are measured. transfer_blocks: how many blocks both
    tiers have, 0 for no CPU tier. batch_tokens: scheduler.max_batch_tokens, for which memory was
    rehearsed. Raises WorkerError when a measured step fails.
    """
    longest = min(pool_tokens, max_context)
    same = {name: value for name, value in where.items() if name not in _COSTS_NO_STEP}
    key = json.dumps([same, chunk_tokens, longest.bit_length(), batch_tokens], sort_keys=True, default=str)
    profile = _known.get(key)
    if profile is None:

        def iteration_s(start: int, stop: int) -> float:
            return prefill_s(worker, clock, chunk_tokens, start, stop)

        profile = measure(iteration_s, chunk_tokens, longest, same, batch_tokens)
    if transfer_blocks and not profile.load_chunk_s:
        profile = replace(profile, load_chunk_s=load_s(worker, clock, transfer_blocks))
    _known[key] = profile
    return profile


_COSTS_NO_STEP = {
    "gpu_pool_bytes", "cpu_pool_bytes", "copies", "model_load_s", "model_reused",
}  # fmt: skip
"""Settings that differ between baselines, or between the trial that loaded the model and those that found it."""


def prefill_s(worker: Worker, clock: Clock, chunk_tokens: int, start: int, stop: int) -> float:
    """Seconds to compute positions [start, stop) over whatever KV lies in the blocks below `start`: its values change no
    time."""
    table = tuple(range(ceil_div(stop, chunk_tokens)))
    tokens = tuple(i % 250 for i in range(start, stop))
    row = Row(slot=0, runs=((start, stop),), tokens=tokens, sample=Sample(stop))
    return _seconds(worker, clock, StepPlan(step=-1, rows=(row,), tables=((0, 0, table),)))


def decodes_s(worker: Worker, clock: Clock, chunk_tokens: int, requests: int, context: int, blocks: int) -> float:
    """One iteration of so many requests that decode behind `context` tokens each, as it is long after the last prefill: the
    median of the later half of DECODES in a row. blocks: of the pool; where it holds fewer than they all
    need, requests share some, which changes what is read by nothing but what a processor's cache keeps."""
    each = ceil_div(context + 1, chunk_tokens)
    tables = tuple(
        (slot, 0, tuple((slot * each + place) % blocks for place in range(each))) for slot in range(requests)
    )
    rows = tuple(Row(slot, ((context, context + 1),), (slot % 250,), Sample(context + 1)) for slot in range(requests))
    times = [_seconds(worker, clock, StepPlan(step=-1, rows=rows, tables=tables)) for _ in range(DECODES)]
    return median(times[DECODES // 2 :])


def load_s(worker: Worker, clock: Clock, blocks: int, inward: bool = True) -> float:
    """Seconds that one more block adds to a load (inward), or to a copy the other way: a plan with many less one with few, so
    that what a step costs drops out.

    blocks: how many both tiers have. Raises WorkerError when a copy fails.
    """
    blocks = min(blocks, _TRANSFER_BLOCKS)
    few = blocks // 4
    fastest: dict[int, float] = {}
    for count in (few, blocks) * _TRANSFER_ROUNDS:
        some = tuple(range(count))
        plan = StepPlan(step=-1, moves=(swap_in(-1, some, some) if inward else swap_out(-1, some, some, urgent=True),))
        took = _seconds(worker, clock, plan) if count else 0.0
        fastest[count] = min(took, fastest.get(count, took))
    added = (fastest[blocks] - fastest[few]) / (blocks - few)
    return added if added > 0 else fastest[blocks] / blocks


def _seconds(worker: Worker, clock: Clock, plan: StepPlan) -> float:
    """Seconds from the launch of a plan until it and its copies are done."""
    began = clock.now_ns()
    worker.launch(plan)
    waits_for, computed = {move.ticket for move in plan.moves}, False
    while waits_for or not computed:
        result = worker.collect(None)
        assert result is not None
        if result.error is not None or not all(one.ok for one in result.moved):
            raise WorkerError(f"Profiling failed: {result.error or 'a copy between the tiers failed.'}")
        waits_for -= {one.ticket for one in result.moved}
        computed = computed or result.step is not None
    return (clock.now_ns() - began) / 1e9


def swap_in(ticket: int, src: tuple[int, ...], dst: tuple[int, ...]) -> Move:
    """CPU blocks to GPU blocks."""
    return Move(ticket, CPU, GPU, src, dst, urgent=True)


def swap_out(ticket: int, src: tuple[int, ...], dst: tuple[int, ...], urgent: bool = False) -> Move:
    """GPU blocks to CPU blocks."""
    return Move(ticket, GPU, CPU, src, dst, urgent=urgent)
