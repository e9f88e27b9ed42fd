"""How iterations are composed and when memory is made free; the defaults are the paper's."""

from __future__ import annotations

from dataclasses import dataclass

from pensieve.errors import ConfigError
from pensieve.scheduler.composition import Composition, unified


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """swap_out_start, swap_out_stop: the low and the high watermark of available blocks; admission_reserve: what an
    admission leaves. All three are shares of the GPU blocks (sections 4.3.2 and 4.3.5).

    max_batch_tokens: positions an iteration computes, at most. max_batch_requests: requests that run at once.
    """

    composition: Composition = unified
    max_batch_tokens: int = 512
    max_batch_requests: int = 64
    swap_out_start: float = 0.25
    swap_out_stop: float = 0.30
    admission_reserve: float = 0.10

    def __post_init__(self) -> None:
        if self.max_batch_tokens < 1 or self.max_batch_requests < 1:
            raise ConfigError("scheduler.max_batch_tokens and scheduler.max_batch_requests must be at least 1.")
        if not 0 <= self.swap_out_start <= self.swap_out_stop <= 1:
            raise ConfigError("scheduler.swap_out_start and swap_out_stop are shares with 0 <= start <= stop <= 1.")
        if not 0 <= self.admission_reserve < 1:
            raise ConfigError("scheduler.admission_reserve is a share of the GPU blocks, at least 0 and below 1.")
