"""What the numbers of a panel stand on: trials of which kinds must not stand in one, and which settings of engines differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pensieve.errors import MixedPanel
from pensieve.lab.results.frame import field_of, mixtures
from pensieve.lab.results.schema import Sweep, Trial


@dataclass(frozen=True, slots=True)
class Provenance:
    """Of all trials of a panel. A tuple with more than one value: they differ in it.

    conversations: measured ones with a completed turn, counted once a seed and repeat, whichever baselines had them.
    kind: "real", "simulated" or both. weights: "random", "none" (simulated) or where they came from. code: hashes.
    load: open, closed, partly open. cache_state: what the workload declared of the start, held against the first turns.
    contended, with_failures: trial ids. incomplete: jobs of the sweep without a completed trial. mixed: what was let
    through by allow_mixed, a clause each.
    """

    sweep: int
    command: str | None
    trials: tuple[int, ...]
    seeds: tuple[int, ...]
    conversations: int
    models: tuple[str, ...]
    dtypes: tuple[str, ...]
    devices: tuple[str, ...]
    kind: tuple[str, ...]
    weights: tuple[str, ...]
    code: tuple[str, ...]
    load: tuple[str, ...]
    cache_state: tuple[str, ...]
    contended: tuple[int, ...]
    with_failures: tuple[int, ...]
    incomplete: int
    mixed: tuple[str, ...]


def trace(sweep: Sweep, trials: Sequence[Trial], conversations: int, incomplete: int, allow_mixed: bool) -> Provenance:
    """Raises MixedPanel where times of these trials must not be compared; allow_mixed: note it instead."""
    reasons = mixtures(trials)
    mixed = tuple(f"{one.what} ({ranges(one.trials)})" if one.trials else one.what for one in reasons)
    if mixed and not allow_mixed:
        raise MixedPanel(
            f"One panel would hold {mixed[0]}; {reasons[0].remedy}, or draw it with --allow-mixed, which it then says."
        )
    return Provenance(
        sweep=sweep.id,
        command=sweep.command,
        trials=tuple(sorted(trial.id for trial in trials)),
        seeds=tuple(sorted({trial.seed for trial in trials})),
        conversations=conversations,
        models=_unique(trial.model for trial in trials),
        dtypes=_unique(trial.dtype for trial in trials),
        devices=_unique(device_of(trial) for trial in trials),
        kind=_unique("simulated" if trial.simulated else "real" for trial in trials),
        weights=_unique("none" if trial.simulated else trial.weights for trial in trials),
        code=_unique(trial.code_hash for trial in trials),
        load=_unique(_declared(trial, "load") or (trial.flags or {}).get("load") for trial in trials),
        cache_state=_unique(_declared(trial, "cache_state") for trial in trials),
        contended=tuple(sorted(trial.id for trial in trials if trial.contended)),
        with_failures=tuple(sorted(trial.id for trial in trials if "failures" in (trial.flags or {}))),
        incomplete=incomplete,
        mixed=mixed,
    )


def footnote(of: Provenance, lead: str) -> str:
    """The caption of a figure, without its title. lead: what a point and its interval are."""
    if not of.trials:
        return f"{lead.rstrip('.')}; COMPUTED, without a trial; sweep {of.sweep}."
    cache = f"{' and '.join(of.cache_state)} at the start" if of.cache_state else "state at the start not recorded"
    served = of.conversations > 0 or bool(of.load)  # a benchmark of a part has neither conversations nor a load
    parts = [
        lead.rstrip("."),
        *(
            [
                f"n = {of.conversations:,} conversations, {len(of.seeds)} seed{'' if len(of.seeds) == 1 else 's'}",
                f"{', '.join(of.models)} ({_weights(of)})",
            ]
            if served
            else []
        ),
        f"{_how(of)} {', '.join(of.devices)}{', ' + ', '.join(of.dtypes) if of.dtypes else ''}",
        *([f"load {' and '.join(of.load) or 'not recorded'}", f"cache {cache}"] if served else []),
        f"code {', '.join(code[:8] for code in of.code)}",
        f"sweep {of.sweep}, trials {ranges(of.trials)}",
    ]
    if of.with_failures:
        parts.append(f"trials {ranges(of.with_failures)} have turns that did not complete")
    if of.incomplete:
        parts.append(f"{of.incomplete} of the sweep's trials did not complete")
    return "; ".join(parts) + "."


def brief(of: Provenance, intervals: bool) -> str:
    """The one line of small print inside a figure: what a reader must not miss. intervals: whether any is drawn, or due."""
    if not of.trials:
        return f"COMPUTED, without a trial; sweep {of.sweep}"
    simulated = f"SIMULATED on {', '.join(of.devices)}"
    kind = simulated if of.kind == ("simulated",) else "measured" if of.kind == ("real",) else "PARTLY SIMULATED"
    parts = [f"{kind}, random weights" if "random" in of.weights else kind]
    if of.conversations > 0:
        seeds = f"{len(of.seeds)} seed{'' if len(of.seeds) == 1 else 's'}"
        parts.append(f"{of.conversations:,} conversations, {seeds}{'' if intervals else ': no intervals'}")
    if of.with_failures or of.incomplete:
        parts.append("not all completed")
    return "; ".join([*parts, f"sweep {of.sweep}"])


def ranges(ids: Sequence[int]) -> str:
    """1, 2, 3, 7 as "1-3, 7"."""
    runs: list[list[int]] = []
    for one in ids:
        if runs and one == runs[-1][1] + 1:
            runs[-1][1] = one
        else:
            runs.append([one, one])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _declared(trial: Trial, name: str) -> str | None:
    found = ((trial.engine or {}).get("workload") or {}).get(name)
    return None if found is None else str(found)


def device_of(trial: Trial) -> str:
    """Its name, and how many of them."""
    name = trial.device or trial.hardware
    return f"{trial.device_count} x {name}" if (trial.device_count or 1) > 1 else name


def _weights(of: Provenance) -> str:
    said = {"none": "no weights: lengths only", "random": "random weights: real speed, meaningless text"}
    return " and ".join(dict.fromkeys(said.get(source, "trained weights") for source in of.weights or ("hub",)))


def _how(of: Provenance) -> str:
    if of.kind == ("simulated",):
        return "SIMULATED by a cost model of"
    return "measured on" if of.kind == ("real",) else "PARTLY SIMULATED,"


def _unique(values: Iterable[str | None]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(value for value in values if value))


# Engines


_SETTINGS = ("gpu_tokens", "cpu_tokens", "max_batch_tokens", "n_batch", "max_batch_requests", "threads", "dtype")


def unlike(trials: Sequence[Trial]) -> str:
    """What engines report that is not the same, for a caption; of ours alone nothing: baselines there differ by design."""
    if not any(field_of(trial, "baseline.engine") for trial in trials):
        return ""
    found = []
    for name in _SETTINGS:
        said: dict[str, dict[str, None]] = defaultdict(dict)
        for trial in trials:
            if (value := (trial.engine or {}).get(name)) is not None:
                said[str(value)][trial.baseline] = None
        if len(said) > 1:
            each = (f"{value} of {', '.join(names)}" for value, names in said.items())
            found.append(f"{name} {' and '.join(each)}")
    return f". Engines' settings that differ: {'; '.join(found)}" if found else ""
