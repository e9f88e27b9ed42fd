"""Which attention and forward served, and how their self-check came out: what stands under every table of real trials."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pensieve.lab.results.schema import Trial


@dataclass(frozen=True, slots=True)
class Served:
    """attention, forward: their names. against: what the right logits were. note: why something better did not serve."""

    attention: str
    forward: str
    against: str
    note: str


def footer(trials: Iterable[Trial]) -> list[str]:
    """A sentence for each way in which trials were served, with the largest difference that its self-checks found; several
    ways are told apart by their baselines. Simulated trials and engines of others have none."""
    found: dict[Served, list[Mapping[str, Any]]] = {}
    baselines: dict[Served, dict[str, None]] = {}
    for trial in trials:
        settings = trial.engine or {}
        if trial.simulated or settings.get("self_check_difference") is None:
            continue
        served = served_of(settings)
        found.setdefault(served, []).append(settings)
        baselines.setdefault(served, {})[trial.baseline] = None
    several = len(found) > 1
    return [
        sentence(served, settings, ", ".join(baselines[served]) if several else "")
        for served, settings in found.items()
    ]


def served_of(settings: Mapping[str, Any]) -> Served:
    """settings: as a torch worker reports them."""
    notes = (settings.get(name) for name in ("attention_note", "forward_note")) if settings.get("fell_back") else ()
    name = f"{settings['attention_backend']} {settings.get('attention_version') or ''}".strip()
    return Served(name, settings["forward"], settings["self_check_against"], " ".join(filter(None, notes)))


def sentence(served: Served, settings: Sequence[Mapping[str, Any]], baselines: str = "") -> str:
    """Say how trials were served, and the self-check of the one among them that came nearest to its limit."""
    worst = max(settings, key=lambda one: one["self_check_difference"] / one["self_check_limit"])
    right = "the model's own" if served.against == "eager" else "those of the same weights in float32"
    of = f" ({baselines})" if baselines else ""
    fell_back = f" Something better did not serve. {served.note}" if served.note else ""
    return (
        f"Attention{of}: {served.attention}; forward: {served.forward}. Self-check passed: logits differ from {right} by "
        f"{worst['self_check_difference']:.2g}, of {worst['self_check_limit']:.2g} allowed.{fell_back}"
    )
