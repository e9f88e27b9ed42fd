"""Profiles a started worker through the plans it performs anyway, once for each device and model in a process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pensieve.clock import Clock
from pensieve.cost.profile import Profile, measure
from pensieve.errors import WorkerError
from pensieve.plan import Copy, Row, Sample, StepPlan
from pensieve.units import ceil_div
from pensieve.worker.base import Worker

_TRANSFER_BLOCKS = 16
_LONGEST = 1024  # tokens; the fit gives what lies beyond
_known: dict[str, Profile] = {}


def profile_of(
    worker: Worker, clock: Clock, chunk_tokens: int, longest: int, transfer_blocks: int, where: Mapping[str, Any]
) -> Profile:
    """Measured before the first request, in the blocks of the pools that the requests will overwrite.

    All baselines of a sweep share one profile, so that their policies decide by the same costs. transfer_blocks: how many
    blocks both tiers have, 0 for no CPU tier. Raises WorkerError when a measured step fails.
    """
    longest = min(longest, _LONGEST)
    same = {name: value for name, value in where.items() if name not in _POOL_SETTINGS}
    key = json.dumps([same, chunk_tokens, longest], sort_keys=True, default=str)
    profile = _known.get(key)
    if profile is None:
        profile = measure(lambda tokens: _prefill_s(worker, clock, chunk_tokens, tokens), chunk_tokens, longest, same)
    if transfer_blocks and not profile.load_chunk_s:
        profile = replace(profile, load_chunk_s=_load_s(worker, clock, min(transfer_blocks, _TRANSFER_BLOCKS)))
    _known[key] = profile
    return profile


_POOL_SETTINGS = {"gpu_pool_bytes", "cpu_pool_bytes", "mean_fragment_bytes"}


def _prefill_s(worker: Worker, clock: Clock, chunk_tokens: int, tokens: int) -> float:
    table = tuple(range(ceil_div(tokens, chunk_tokens)))
    row = Row(slot=0, runs=((0, tokens),), tokens=tuple(i % 250 for i in range(tokens)), sample=Sample(tokens))
    return _seconds(worker, clock, StepPlan(step=-1, rows=(row,), tables=((0, 0, table),)))


def _load_s(worker: Worker, clock: Clock, blocks: int) -> float:
    copies = tuple(range(blocks))
    times = [_seconds(worker, clock, StepPlan(step=-1, swap_in=(Copy(-1, copies, copies),))) for _ in range(3)]
    return min(times) / blocks


def _seconds(worker: Worker, clock: Clock, plan: StepPlan) -> float:
    began = clock.now_ns()
    worker.launch(plan, None)
    result = worker.collect(None)
    assert result is not None
    if result.error is not None:
        raise WorkerError(f"Profiling failed: {result.error}")
    return (clock.now_ns() - began) / 1e9
