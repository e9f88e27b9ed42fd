"""What the numbers of a panel stand on: trials of which kinds must not stand in one, and how a figure says it."""

from collections.abc import Sequence
from dataclasses import dataclass

from pensieve.errors import MixedPanel
from pensieve.lab.results.frame import field_of, mixtures
from pensieve.lab.results.notes import plan_of
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

    @property
    def of_seeds(self) -> str:
        several = "" if len(self.seeds) == 1 else "s"
        return f"{self.conversations:,} conversations, {len(self.seeds)} seed{several}"


def trace(sweep: Sweep, trials: Sequence[Trial], conversations: int, incomplete: int, allow_mixed: bool) -> Provenance:
    """Raises MixedPanel where times of these trials must not be compared; allow_mixed: note it instead."""
    reasons = mixtures(trials)
    mixed = tuple(f"{one.what} ({ranges(one.trials)})" if one.trials else one.what for one in reasons)
    if mixed and not allow_mixed:
        raise MixedPanel(
            f"One panel would hold {mixed[0]}; {reasons[0].remedy}, or draw it with --allow-mixed, which it then says."
        )
    loads = [str(plan_of(trial).get("load") or field_of(trial, "flags.load") or "") for trial in trials]
    return Provenance(
        sweep=sweep.id,
        command=sweep.command,
        trials=tuple(sorted(trial.id for trial in trials)),
        seeds=tuple(sorted({trial.seed for trial in trials})),
        conversations=conversations,
        models=_unique([trial.model for trial in trials]),
        dtypes=_unique([trial.dtype for trial in trials]),
        devices=_unique([device_of(trial) for trial in trials]),
        kind=_unique(["simulated" if trial.simulated else "real" for trial in trials]),
        weights=_unique(["none" if trial.simulated else trial.weights for trial in trials]),
        code=_unique([trial.code_hash for trial in trials]),
        load=_unique(loads),
        cache_state=_unique([str(plan_of(trial).get("cache_state") or "") for trial in trials]),
        contended=tuple(sorted(trial.id for trial in trials if trial.contended)),
        with_failures=tuple(sorted(trial.id for trial in trials if field_of(trial, "flags.failures"))),
        incomplete=incomplete,
        mixed=mixed,
    )


def footnote(of: Provenance, lead: str) -> str:
    """The caption of a figure, without its title. lead: what a point and its interval are."""
    if not of.trials:
        return f"{lead.rstrip('.')}; COMPUTED, without a trial; sweep {of.sweep}."
    said = {"simulated": "SIMULATED by a cost model of", "real": "measured on"}
    how = said[of.kind[0]] if len(of.kind) == 1 else "PARTLY SIMULATED,"
    measured = f"{how} {', '.join((*of.devices, *of.dtypes))}"
    parts = [lead.rstrip(".")]
    if of.conversations > 0 or of.load:  # a benchmark of a part has neither conversations nor a load
        named = {"none": "no weights: lengths only", "random": "random weights: real speed, meaningless text"}
        weights = dict.fromkeys(named.get(source, "trained weights") for source in of.weights or ("hub",))
        cache = f"{' and '.join(of.cache_state)} at the start" if of.cache_state else "state at the start not recorded"
        parts += [f"n = {of.of_seeds}", f"{', '.join(of.models)} ({' and '.join(weights)})", measured]
        parts += [f"load {' and '.join(of.load) or 'not recorded'}", f"cache {cache}"]
    else:
        parts += [measured]
    parts += [f"code {', '.join(code[:8] for code in of.code)}", f"sweep {of.sweep}, trials {ranges(of.trials)}"]
    if of.with_failures:
        parts += [f"trials {ranges(of.with_failures)} have turns that did not complete"]
    if of.incomplete:
        parts += [f"{of.incomplete} of the sweep's trials did not complete"]
    return "; ".join(parts) + "."


def brief(of: Provenance, intervals: bool) -> str:
    """The one line of small print inside a figure: what a reader must not miss. intervals: whether any is drawn, or due."""
    if not of.trials:
        return f"COMPUTED, without a trial; sweep {of.sweep}"
    simulated = f"SIMULATED on {', '.join(of.devices)}"
    said = {"simulated": simulated, "real": "measured"}
    kind = said[of.kind[0]] if len(of.kind) == 1 else "PARTLY SIMULATED"
    parts = [f"{kind}, random weights" if "random" in of.weights else kind]
    if of.conversations > 0:
        parts.append(f"{of.of_seeds}{'' if intervals else ': no intervals'}")
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


def device_of(trial: Trial) -> str:
    """Its name, and how many of them."""
    name = trial.device or trial.hardware
    return f"{trial.device_count} x {name}" if (trial.device_count or 1) > 1 else name


def _unique(values: Sequence[str | None]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(value for value in values if value))
