"""Times several ways to do the same work in interleaved rounds, so that a disturbance meets all of them alike; and the share
of the time in which a GPU was idle."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from time import perf_counter

import torch

from pensieve.lab.bench.case import Measured

os.environ.setdefault("TEARDOWN_CUPTI", "0")  # taken down and brought up again beside CUDA graphs, it crashes

_WARM_CALLS = 2
_MOST_CALLS = 200


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all its work; on a CPU there is nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def turns(names: Sequence[str], rounds: int) -> Iterator[str]:
    """Yield all names once a round, each round beginning with another one."""
    for number in range(rounds):
        shift = number % len(names) if names else 0
        yield from (*names[shift:], *names[:shift])


def in_turn(
    ways: Mapping[str, Callable[[], float]], rounds: int, failed: dict[str, str] | None = None
) -> dict[str, list[float]]:
    """The milliseconds that each way returns, once a round. failed: gets the error of a way that raises, which is then left
    out while the others go on; None: it raises."""
    values: dict[str, list[float]] = {name: [] for name in ways}
    for name in turns(list(ways), rounds):
        if failed is None:
            values[name].append(ways[name]())
        else:
            values[name] += attempt(name, failed, lambda name=name: [ways[name]()])  # type: ignore[misc]
    return values


def attempt(name: str, failed: dict[str, str], measure: Callable[[], list[float]]) -> list[float]:
    """What was measured; nothing where `failed` has the name, or has it now."""
    if name in failed:
        return []
    try:
        return measure()
    except Exception as error:  # a backend may refuse in any way it likes; the others go on
        failed[name] = explain(error)
        return []


def interleaved(
    runs: Mapping[str, Callable[[], object]], rounds: int, device: torch.device, at_least_ms: float = 5.0
) -> dict[str, Measured]:
    """Milliseconds a call of each run, once a round in turn.

    A run shorter than `at_least_ms` is called several times in a row, and the time is divided. On a GPU the time is the
    device's (events on the current stream around the calls), so a run that ends on other streams must make the current one
    wait for them; on a CPU it is the wall's. A run that raises gets its error in place of values. Call under
    torch.inference_mode() where gradients are not wanted.
    """
    failed: dict[str, str] = {}
    once = in_turn({name: partial(_warmed, run, device) for name, run in runs.items()}, 1, failed)
    calls = {name: round(at_least_ms / max(ms, 1e-4)) for name, found in once.items() for ms in found}
    ways = {name: partial(_timed, runs[name], max(1, min(_MOST_CALLS, n)), device) for name, n in calls.items()}
    values = in_turn(ways, rounds, failed)
    return {
        name: Measured(name, values.get(name, ()) if name not in failed else (), error=failed.get(name))
        for name in runs
    }


def _warmed(run: Callable[[], object], device: torch.device) -> float:
    for _ in range(_WARM_CALLS):  # compiles, chooses kernels, touches memory
        run()
    return _timed(run, 1, device)


def _timed(run: Callable[[], object], calls: int, device: torch.device) -> float:
    if device.type == "cuda":
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        began.record()
        for _ in range(calls):
            run()
        ended.record()
        torch.cuda.synchronize(device)
        return float(began.elapsed_time(ended)) / calls
    started = perf_counter()
    for _ in range(calls):
        run()
    return (perf_counter() - started) * 1e3 / calls


def explain(error: BaseException) -> str:
    """The first line of what was raised, with its kind."""
    text = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        return f"the device ran out of memory ({text})"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


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
