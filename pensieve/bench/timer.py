"""Times several ways of doing the same work in interleaved rounds, so that a disturbance meets all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter

import torch

_WARM_CALLS = 2
_MOST_CALLS = 200


@dataclass(frozen=True, slots=True)
class Times:
    """milliseconds a call, one value a round; error: why there are none."""

    values: tuple[float, ...] = ()
    error: str | None = None


def synchronize(device: torch.device) -> None:
    """Until the device has done all that it was given; nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleaved(
    runs: Mapping[str, Callable[[], object]], rounds: int, device: torch.device, at_least_ms: float = 5.0
) -> dict[str, Times]:
    """Milliseconds a call of each run. In every round each of them is timed once, each round beginning with another.

    A run shorter than `at_least_ms` is called several times in a row and divided. On a GPU the device itself takes the
    time (events on the current stream around the calls), so a run that ends on other streams must make the current one
    wait for them; on a CPU it is the wall's. A run that raises is left out, with its sentence. Call under
    torch.inference_mode() where gradients are not wanted.
    """
    calls: dict[str, int] = {}
    failed: dict[str, str] = {}
    values: dict[str, list[float]] = {name: [] for name in runs}
    for name, run in runs.items():
        try:
            for _ in range(_WARM_CALLS):  # compiles, chooses kernels, touches memory
                run()
            once = _timed(run, 1, device)
        except Exception as error:  # a backend may refuse in any way it likes; the others go on
            failed[name] = explain(error)
            continue
        calls[name] = max(1, min(_MOST_CALLS, round(at_least_ms / max(once, 1e-4))))
    names = list(calls)
    for number in range(rounds):
        shift = number % len(names) if names else 0
        for name in names[shift:] + names[:shift]:
            if name in failed:
                continue
            try:
                values[name].append(_timed(runs[name], calls[name], device))
            except Exception as error:
                failed[name] = explain(error)
    return {name: Times((), failed[name]) if name in failed else Times(tuple(values[name])) for name in runs}


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
