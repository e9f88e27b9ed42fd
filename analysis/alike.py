"""Whether engines ran with the same sizes, batches and threads: otherwise their times say nothing of the engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from analysis.sweep import Cell
from pensieve.errors import MixedPanel
from pensieve.results.fields import field_of

Reported = Mapping[str, Any]
"""What the engine of a trial says of itself."""


def refuse_unlike(cells: Iterable[Cell]) -> None:
    """Raise MixedPanel where an engine and its other interface ran with unlike settings, at one place of the swept axes. What
    an engine does not report is not held against it."""
    _refuse(cells, ("gpu_tokens", "cpu_tokens"))


def refuse_unlike_engines(cells: Iterable[Cell]) -> None:
    """The same for different engines, as soon as one of them is of others: baselines in ours differ by design. One with a
    single tier may have in it what others have in two (baseline.kv_budget=total)."""
    cells = list(cells)
    if any(field_of(trial, "baseline.engine") for cell in cells for trial in cell.trials):
        _refuse(cells, ("kv_tokens",))


def _kv_tokens(engine: Reported) -> int | None:
    tokens = engine.get("gpu_tokens")
    return None if tokens is None else int(tokens) + int(engine.get("cpu_tokens") or 0)


def _n_batch(engine: Reported) -> Any:
    """llama.cpp's, whose forwards have n_ubatch tokens (max_batch_tokens); in other engines an iteration is one forward."""
    return engine.get("n_batch", engine.get("max_batch_tokens"))


_DERIVED: Mapping[str, Callable[[Reported], Any]] = {"kv_tokens": _kv_tokens, "n_batch": _n_batch}
_ALIKE = ("max_batch_tokens", "n_batch", "max_batch_requests", "threads", "dtype")


def _refuse(cells: Iterable[Cell], kv: tuple[str, ...]) -> None:
    places: dict[tuple[tuple[str, str], ...], list[Cell]] = {}
    for cell in cells:
        places.setdefault(tuple(sorted(cell.at.items())), []).append(cell)
    unlike = {
        f"{name} is " + " and ".join(f"{value} for {baseline}" for value, baseline in found.items()): None
        for together in places.values()
        for name in (*kv, *_ALIKE)
        if len(found := _values(together, name)) > 1
    }
    if unlike:
        raise MixedPanel(
            f"Engines of unlike settings cannot be compared: {'; '.join(unlike)}. Give them the same with cache.gpu, "
            "cache.cpu, baseline.kv_budget, scheduler.max_batch_tokens, scheduler.max_batch_requests and hardware.threads."
        )


def _values(cells: Iterable[Cell], name: str) -> dict[str, str]:
    """Each with the first baseline that has it."""
    found: dict[str, str] = {}
    for cell in cells:
        for trial in cell.trials:
            engine = trial.engine or {}
            value = _DERIVED[name](engine) if name in _DERIVED else engine.get(name)
            if value is not None:
                found.setdefault(str(value), cell.baseline)
    return found
