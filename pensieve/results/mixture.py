"""Why trials must not be compared with each other: one rule for figures, claims, comparisons and reports."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pensieve.results.code import outside_names
from pensieve.results.schema import Trial


@dataclass(frozen=True, slots=True)
class Mixture:
    """One reason. what: a noun phrase. remedy: what the reader should do. trials: the ids concerned, empty: all of them."""

    what: str
    remedy: str
    trials: tuple[int, ...] = ()


def mixtures(trials: Sequence[Trial]) -> list[Mixture]:
    """Why times of these trials must not be compared; empty where they may be."""
    found = []
    if len({trial.simulated for trial in trials}) > 1:
        found.append(Mixture("simulated and real trials", "keep to one kind of hardware"))
    contended = tuple(sorted(trial.id for trial in trials if trial.contended))
    if contended:
        what = "trials that shared their device with others"
        found.append(Mixture(what, "run them again with trial.exclusive=true", contended))
    profiled = tuple(sorted(trial.id for trial in trials if (trial.flags or {}).get("profiled")))
    if profiled:
        found.append(Mixture("trials that a profiler slowed", "run them again without trial.profile=true", profiled))
    contaminated = tuple(sorted(trial.id for trial in trials if (trial.flags or {}).get("contaminated")))
    if contaminated:
        what = "trials whose engine still held what an earlier run had asked"
        found.append(Mixture(what, "start it anew, or run them with cache_state=salted and another seed", contaminated))
    if len({trial.weights == "random" for trial in trials if not trial.simulated}) > 1:
        found.append(Mixture("random and trained weights", "give all trials the same model.weights"))
    if any(len(hashes) > 1 for hashes in _code(trials).values()):
        what = "trials of different versions of the code"
        found.append(Mixture(what, "run the sweep's command again, which redoes the older ones"))
    return found


def _code(trials: Sequence[Trial]) -> Mapping[tuple[str, ...], set[str]]:
    """Hashes of the code, grouped by the classes outside the package that a trial names. Their source is part of the hash,
    so two hashes mean two versions of the code only where the same classes are named."""
    found: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for trial in trials:
        found[tuple(sorted(outside_names(trial.config or {})))].add(trial.code_hash)
    return found
