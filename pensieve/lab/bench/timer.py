"""Times several ways to do the same work in interleaved rounds, so that a disturbance meets all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter

import torch

from pensieve.lab.bench.case import Measured

_WARM_CALLS = 2
_MOST_CALLS = 200


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all its work; on a CPU there is nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def in_turn(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, Measured]:
    """The milliseconds that each way returns, once a round, each round beginning with another one. A round before warms up,
    and does not count. A way that raises has its error in place of values, and the others go on."""
    names, found = list(ways), {name: Measured(name) for name in ways}
    values: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-1, rounds):
        shift = max(0, number) % max(1, len(names))
        for name in (*names[shift:], *names[:shift]):
            if found[name].error is None:
                found[name] = _once(name, ways[name])
                values[name] += found[name].values if number >= 0 else ()
    return {name: one if one.error else Measured(name, values[name]) for name, one in found.items()}


def _once(name: str, way: Callable[[], float]) -> Measured:
    return attempt(name, lambda: [way()])


def attempt(name: str, measure: Callable[[], list[float]]) -> Measured:
    """What was measured, or why nothing was."""
    try:
        return Measured(name, measure())
    except Exception as error:  # a backend may refuse in any way it likes; the others go on
        return Measured(name, error=explain(error))


def interleaved(
    runs: Mapping[str, Callable[[], object]], rounds: int, device: torch.device, at_least_ms: float = 5.0
) -> dict[str, Measured]:
    """Milliseconds a call of each run, as in_turn.

    A run shorter than `at_least_ms` is called several times in a row, and the time is divided. On a GPU the time is the
    device's (events on the current stream around the calls), so a run that ends on other streams must make the current one
    wait for them; on a CPU it is the wall's. Call under torch.inference_mode() where gradients are not wanted.
    """
    return in_turn({name: _several(run, device, at_least_ms) for name, run in runs.items()}, rounds)


def _several(run: Callable[[], object], device: torch.device, at_least_ms: float) -> Callable[[], float]:
    calls = 0

    def way() -> float:
        nonlocal calls
        if not calls:
            for _ in range(_WARM_CALLS):  # compiles, chooses kernels, touches memory
                run()
            once = _timed(run, 1, device)
            calls = max(1, min(_MOST_CALLS, round(at_least_ms / max(once, 1e-4))))
            return once
        return _timed(run, calls, device)

    return way


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
