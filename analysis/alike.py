"""Whether engines ran with the same sizes, batches and threads: otherwise their times say nothing of the engines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

from analysis.sweep import Cell, Panel, Source
from pensieve.errors import MixedPanel
from pensieve.lab.results.schema import Trial
from pensieve.lab.results.trials import field_of
from pensieve.units import ceil_div

Reported = Mapping[str, Any]
"""What the engine of a trial says of itself."""

SLOT_CELLS, RAM_STEP = 256, 2**20
"""llama.cpp's steps: KV of a slot in cells, its host-memory prompt cache in bytes."""


def panels_of_engines(source: Source, *along: str) -> Iterator[Panel]:
    """The panels of a figure that compares engines. Raises MixedPanel where one of others ran with unlike settings, at one
    place of the axes; where the source allows mixtures, the panel notes it. What an engine does not report is not held
    against it, and baselines in ours differ by design.
    """
    for panel in source.panels(*along):
        outside = any(field_of(trial, "baseline.engine") for cell in panel.cells for trial in cell.trials)
        yield _checked(panel, _unlike(panel.cells) if outside else [], source.allow_mixed)


def _checked(panel: Panel, unlike: list[str], allow_mixed: bool) -> Panel:
    if not unlike:
        return panel
    found = f"engines of unlike settings: {'; '.join(unlike)}"
    if not allow_mixed:
        raise MixedPanel(
            f"One panel would hold {found}. Give them the same with cache.gpu, cache.cpu, baseline.kv_budget, "
            "scheduler.max_batch_tokens, scheduler.max_batch_requests and hardware.threads, or draw it with --allow-mixed, "
            "which it then says."
        )
    return replace(panel, provenance=replace(panel.provenance, mixed=(*panel.provenance.mixed, found)))


def _n_batch(engine: Reported) -> Any:
    """llama.cpp's, whose forwards have n_ubatch tokens (max_batch_tokens); in other engines an iteration is one forward."""
    return engine.get("n_batch", engine.get("max_batch_tokens"))


def _kv_tokens(engine: Reported) -> str | None:
    """On the device, and behind it."""
    gpu, cpu = engine.get("gpu_tokens"), engine.get("cpu_tokens")
    return None if gpu is None else f"{gpu} + {cpu}" if cpu else str(gpu)


def _equal(one: Trial, other: Trial, name: str) -> bool:
    return str(_value(one, name)) == str(_value(other, name))


def _same_kv(one: Trial, other: Trial, _: str) -> bool:
    """Tier by tier, but for what llama.cpp rounds. An engine with a single tier may have in it what the other has on its
    device (baseline.kv_budget=device), or in both tiers (total)."""
    engines = [one.engine or {}, other.engine or {}]
    (gpu, other_gpu), (cpu, other_cpu) = (
        [int(engine.get(tier) or 0) for engine in engines] for tier in ("gpu_tokens", "cpu_tokens")
    )
    slots, ram = (max(map(rounds, engines)) for rounds in (_slot_rounding, _ram_rounding))
    device = abs(gpu - other_gpu) <= slots
    if bool(cpu) == bool(other_cpu):
        return device and abs(cpu - other_cpu) <= ram
    total = abs(gpu + cpu - other_gpu - other_cpu) <= slots + ram
    budget = field_of(other if cpu else one, "baseline.kv_budget")
    return {"device": device, "total": total}.get(str(budget), device or total)


def _slot_rounding(engine: Reported) -> int:
    """Tokens by which its KV may be less than what it was given."""
    slots = engine.get("n_parallel")
    if slots is None:
        return 0
    return SLOT_CELLS * (1 if engine.get("configured_kv_unified") else int(slots)) - 1


def _ram_rounding(engine: Reported) -> int:
    if "configured_ram_cache_mib" not in engine:
        return 0
    return ceil_div(RAM_STEP, int(engine["kv_bytes_per_token"]))


def _same_requests(one: Trial, other: Trial, name: str) -> bool:
    """Bounds that the workload does not reach are as good as one."""
    asked = max(_at_once(one), _at_once(other))
    return _equal(one, other, name) or asked <= min(_value(one, name), _value(other, name))


def _at_once(trial: Trial) -> float:
    found = ((trial.engine or {}).get("workload") or {}).get("requests_at_once")
    return math.inf if found is None else float(found)


Same = Callable[[Trial, Trial, str], bool]
_DERIVED: Mapping[str, Callable[[Reported], Any]] = {"kv_tokens": _kv_tokens, "n_batch": _n_batch}
_ALIKE: Mapping[str, Same] = {
    "kv_tokens": _same_kv,
    "max_batch_tokens": _equal,
    "n_batch": _equal,
    "max_batch_requests": _same_requests,
    "threads": _equal,
    "dtype": _equal,
}


def _unlike(cells: Iterable[Cell]) -> list[str]:
    """A clause for each setting that is not the same at one place of the axes."""
    places: dict[tuple[tuple[str, str], ...], list[Trial]] = {}
    for cell in cells:
        places.setdefault(tuple(sorted(cell.at.items())), []).extend(cell.trials)
    found: dict[str, None] = {}
    for trials in places.values():
        for name, same in _ALIKE.items():
            known = [trial for trial in trials if _value(trial, name) is not None]
            if not all(same(one, other, name) for one, other in combinations(known, 2)):
                said: dict[str, str] = {}
                for trial in known:
                    said.setdefault(str(_value(trial, name)), trial.baseline)
                values = [f"{value} for {baseline}" for value, baseline in said.items()]
                found[f"{name} is {' and '.join(values)}"] = None
    return list(found)


def _value(trial: Trial, name: str) -> Any:
    engine = trial.engine or {}
    return _DERIVED[name](engine) if name in _DERIVED else engine.get(name)
