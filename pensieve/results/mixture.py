"""Why trials must not be compared with each other: one rule for figures, claims, comparisons and reports."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pensieve.results.code import outside_names
from pensieve.results.identity import NOT_CONFIG
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
    unlike = sorted({name for names in _forwards(trials).values() if len(names) > 1 for name in names})
    if unlike:
        what = f"trials of one baseline and setting with different forwards ({'; '.join(unlike)})"
        found.append(Mixture(what, "run all of them again with force=true, and hardware.cpu_memory set on a CPU"))
    return found


def _forwards(trials: Sequence[Trial]) -> Mapping[tuple[str, str], set[str]]:
    """What computed the forwards of each baseline and setting, where it was recorded: whether weights are packed without a
    limit of memory depends on what else the machine held."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for trial in trials:
        forward = (trial.engine or {}).get("forward")
        if forward is not None:
            left_out = (*NOT_CONFIG, "seed", "repeat")
            setting = {key: value for key, value in (trial.config or {}).items() if key not in left_out}
            found[trial.baseline, json.dumps(setting, sort_keys=True, default=str)].add(str(forward))
    return found


def _code(trials: Sequence[Trial]) -> Mapping[tuple[str, ...], set[str]]:
    """Hashes of the code, grouped by the classes outside the package that a trial names. Their source is part of the hash,
    so two hashes mean two versions of the code only where the same classes are named."""
    found: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for trial in trials:
        found[tuple(sorted(outside_names(trial.config or {})))].add(trial.code_hash)
    return found
