"""Batching: which positions one iteration computes, and the settings it goes by."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

from pensieve.core.scheduler.active_request import ActiveRequest
from pensieve.core.scheduler.copy_ahead import AskedCopyAhead
from pensieve.errors import ConfigError

Share = tuple[ActiveRequest, int]
"""A running request and how many positions of its work this iteration computes."""

Composition = Callable[[Sequence[ActiveRequest], int], list[Share]]
"""From the running requests and the token budget of an iteration to its shares."""


def unified(running: Sequence[ActiveRequest], max_tokens: int) -> list[Share]:
    """Prefill and decode in one batch (paper section 4.2): decodes first, since they are one token each and somebody reads
    them; the rest of the budget goes to prefills, first come, first served."""
    shares: list[Share] = []
    others: list[ActiveRequest] = []
    for active in running:
        if active.decoding:
            shares.append((active, 1))
        else:
            others.append(active)
    shares = shares[:max_tokens]
    return shares + _prefills(others, max_tokens - len(shares))


def split(running: Sequence[ActiveRequest], max_tokens: int) -> list[Share]:
    """Prefill and decode in separate iterations, prefill first: the paper's ablation."""
    prefills = _prefills((active for active in running if not active.decoding), max_tokens)
    return prefills or [(active, 1) for active in running if active.decoding][:max_tokens]


def _prefills(running: Iterable[ActiveRequest], budget: int) -> list[Share]:
    shares: list[Share] = []
    for active in running:
        if budget <= 0:
            break
        if active.work_tokens:
            count = min(active.work_tokens, budget)
            shares.append((active, count))
            budget -= count
    return shares


def high_watermark(swap_out_stop: float, gpu_blocks: int) -> int:
    """Blocks that are free or clean when copies ahead of time stop."""
    return math.ceil(swap_out_stop * gpu_blocks)


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """How iterations are composed and when memory is made free; the defaults are the paper's.

    max_batch_tokens: positions an iteration computes, at most. max_batch_requests: requests that run at once.
    swap_out_start, swap_out_stop: the low and the high watermark of available blocks; admission_reserve: what an admission
    leaves. All three are shares of the GPU blocks (sections 4.3.2 and 4.3.5). copy_ahead: see CopyAhead; auto is resolved
    by whoever starts the engine. load_apart: a request whose KV is
    on CPU joins the batch when what is left of its load fits an iteration (see Loads); the paper's engine waits for it.
    admit_beyond_budget: admit whoever fits into memory, so that what it has on the CPU is loaded before its turn to
    compute; False: only while this iteration has positions left, as vLLM does. cost_error, cost_error_context: see
    cost.mistaken.
    """

    composition: Composition = unified
    max_batch_tokens: int = 512
    max_batch_requests: int = 64
    swap_out_start: float = 0.25
    swap_out_stop: float = 0.30
    admission_reserve: float = 0.10
    copy_ahead: AskedCopyAhead = "paper"
    load_apart: bool = False
    admit_beyond_budget: bool = True
    cost_error: float = 1.0
    cost_error_context: float = 1.0

    def __post_init__(self) -> None:
        if self.max_batch_tokens < 1 or self.max_batch_requests < 1:
            raise ConfigError("scheduler.max_batch_tokens and scheduler.max_batch_requests must be at least 1.")
        if not 0 <= self.swap_out_start <= self.swap_out_stop <= 1:
            raise ConfigError("scheduler.swap_out_start and swap_out_stop are shares with 0 <= start <= stop <= 1.")
        if self.copy_ahead not in get_args(AskedCopyAhead):
            raise ConfigError(
                f"scheduler.copy_ahead is one of {', '.join(get_args(AskedCopyAhead))}, not {self.copy_ahead!r}."
            )
        if not 0 <= self.admission_reserve < 1:
            raise ConfigError("scheduler.admission_reserve is a share of the GPU blocks, at least 0 and below 1.")

    @property
    def is_unified(self) -> bool:
        """Every iteration computes all decodes, and prefills as far as it then has positions left."""
        return getattr(self.composition, "func", self.composition) is unified  # Hydra makes a partial of it
