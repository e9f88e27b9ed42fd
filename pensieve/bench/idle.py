"""How much of the time a GPU did nothing, from the kernels that the profiler saw."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import torch

os.environ.setdefault("TEARDOWN_CUPTI", "0")  # taken down and brought up again beside CUDA graphs, it crashes


def idle_pct(run: Callable[[], object]) -> float | None:
    """Percent of the time between the first kernel of `run` and the last in which no kernel or copy was running.

    None where the profiler saw none. Profiling slows the host, so this is an upper bound.
    """
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    spans = [
        (float(event.time_range.start), float(event.time_range.end))
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]
    return gaps_pct(spans)


def gaps_pct(spans: Iterable[tuple[float, float]]) -> float | None:
    """Percent of the stretch from the first start to the last end that no span covers; None without a stretch."""
    covered, reached, first = 0.0, None, None
    for start, end in sorted(spans):
        if reached is None:
            first, reached = start, start
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    if first is None or reached is None or reached <= first:
        return None
    return 100 * (1 - covered / (reached - first))
