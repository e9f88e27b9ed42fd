"""What the numbers of a panel stand on, and which of them must not stand in one panel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pensieve.errors import MixedPanel
from pensieve.results.mixture import Mixture, mixtures
from pensieve.results.schema import Sweep, Trial
from pensieve.results.store import ResultsStore
from pensieve.results.summary import measured_turns


@dataclass(frozen=True, slots=True)
class Provenance:
    """Of all trials of a panel (sweep None: of a bench). A tuple with more than one value: they differ in it.

    conversations: measured ones with a completed turn, counted once a seed and repeat, whichever baselines had them.
    kind: "real", "simulated" or both. weights: "random", "none" (simulated) or where they came from. code: hashes.
    load: open, closed, partly open. cache_state: what the workload declared of the start, held against the first turns.
    contended, with_failures: trial ids. incomplete: jobs of the sweep without a completed trial. mixed: what was let
    through by allow_mixed, a clause each.
    """

    sweep: int | None
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


def trace(
    store: ResultsStore, sweep: Sweep | None, trials: Sequence[Trial], incomplete: int = 0, allow_mixed: bool = False
) -> Provenance:
    """Raises MixedPanel where simulated stand beside real trials, random beside trained weights, trials beside others on
    their device, or one version of the code beside another; allow_mixed: note it instead."""
    found = mixtures(trials)
    mixed = tuple(_clause(one) for one in found)
    if mixed and not allow_mixed:
        raise MixedPanel(
            f"One panel would hold {mixed[0]}; {found[0].remedy}, or draw it with --allow-mixed, which it then says."
        )
    return Provenance(
        sweep=sweep.id if sweep else None,
        command=sweep.command if sweep else None,
        trials=tuple(sorted(trial.id for trial in trials)),
        seeds=tuple(sorted({trial.seed for trial in trials})),
        conversations=len({key for trial in trials for key in _conversations(store, trial)}),
        models=_unique(trial.model for trial in trials),
        dtypes=_unique(trial.dtype for trial in trials),
        devices=_unique(_device(trial) for trial in trials),
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
    """The small print of a figure. lead: what a point and its interval are."""
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
        *([f"load {' and '.join(of.load) or 'not recorded'}", _cache_state(of)] if served else []),
        f"code {', '.join(code[:8] for code in of.code)}",
        f"{'' if of.sweep is None else f'sweep {of.sweep}, '}trials {ranges(of.trials)}",
    ]
    if of.with_failures:
        parts.append(f"trials {ranges(of.with_failures)} have turns that did not complete")
    if of.incomplete:
        parts.append(f"{of.incomplete} of the sweep's trials did not complete")
    return "; ".join(parts) + "."


def _cache_state(of: Provenance) -> str:
    if of.cache_state:
        return f"cache {' and '.join(of.cache_state)} at the start"
    return "cache state at the start not recorded"


def ranges(ids: Sequence[int]) -> str:
    """1, 2, 3, 7 as "1-3, 7"."""
    runs: list[list[int]] = []
    for one in ids:
        if runs and one == runs[-1][1] + 1:
            runs[-1][1] = one
        else:
            runs.append([one, one])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _clause(mixture: Mixture) -> str:
    return f"{mixture.what} ({ranges(mixture.trials)})" if mixture.trials else mixture.what


def _conversations(store: ResultsStore, trial: Trial) -> set[tuple[int, int, str]]:
    return {(trial.seed, trial.repeat, row.session) for row in measured_turns(store, trial.id, "session")}


def _declared(trial: Trial, name: str) -> str | None:
    found = ((trial.engine or {}).get("workload") or {}).get(name)
    return None if found is None else str(found)


def _device(trial: Trial) -> str:
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
