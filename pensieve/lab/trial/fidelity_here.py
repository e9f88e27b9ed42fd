"""How far a machine's simulation (hardware=sim_paired, sim_profile) is from the machine: the same trials on both, a verdict.

Real trials are repeated; what each simulated one is held against is their median, and the mean size of its errors counts:
simulated ones differ where each repeat goes by a profile of its own minutes. Beside the error stands what each real repeat
is off from the median of the others, reckoned alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import copysign
from statistics import fmean
from typing import Any

from rich.console import Group, RenderableType

from pensieve.lab.results.frame import Frame, values_of
from pensieve.lab.results.schema import Trial
from pensieve.lab.results.store import ResultsStore
from pensieve.lab.statistics import median
from pensieve.lab.tables import NONE, grid

HIT_POINTS, THROUGHPUT_PCT, TTFT_PCT = 1.0, 5.0, 10.0
"""What each error may come to: hit rates in points, by tier; output tokens a second; first tokens, mean over turns."""
FEWEST_REPEATS = 5
_RATES = {"gpu_hit_rate": "GPU", "cpu_hit_rate": "CPU", "miss_rate": "missed"}
FLOW, TTFT = "throughput_output_tok_s", "ttft"
_AXIS = "hardware"
_LEGEND = (
    "Simulated: how far each simulation is from the median of n real repeats. Real again: how far each of these is from "
    "that of the others. Both are mean sizes, with the sign of their mean. Hit rates by tier and miss rate: in points. "
    "Output tokens/s: in %. TTFT: in %, the mean over turns of each one's error."
)

MEASURED_AT = "machine_measured_at"
"""In a real trial's column `engine`: when the profile was measured that it wrote beside itself."""
ByTurn = Mapping[tuple[str, int], float]
"""(conversation, turn) -> ms."""


Errors = Mapping[str, float | None]
"""By figure: rates in points, throughput and TTFT in percent. None: cannot be told."""


@dataclass(frozen=True, slots=True)
class Observed:
    """One trial. figures: of _RATES, as shares, None where there was no history; and its throughput."""

    figures: Mapping[str, float | None]
    ttft_ms: ByTurn


@dataclass(frozen=True, slots=True)
class Compared:
    """One place of the sweep. simulated: against the median of the real repeats; real: a repeat against that of the others,
    None below two. Both are means of sizes. unpaired: simulations by a profile that the real trial of their repeat did not
    measure, where it measured one."""

    place: str
    repeats: int
    simulated: Errors
    real: Errors | None
    unpaired: int = 0


def furthest_rate(errors: Errors) -> float | None:
    return max((rate for name in _RATES if (rate := errors.get(name)) is not None), key=abs, default=None)


def within(errors: Errors) -> bool:
    """Hits may be unknown, where there is no history; what has no throughput or no first tokens is not within."""
    found = (furthest_rate(errors) or 0.0, errors.get(FLOW), errors.get(TTFT))
    limits = zip(found, (HIT_POINTS, THROUGHPUT_PCT, TTFT_PCT), strict=True)
    return all(error is not None and abs(error) <= limit for error, limit in limits)


def errors_of(one: Observed, others: Sequence[Observed]) -> Errors:
    """Of a trial against the median of others. TTFT: mean absolute percentage error over the turns that all have."""
    off: dict[str, float | None] = {}
    for name in (*_RATES, FLOW):
        ours, theirs = (
            one.figures.get(name),
            [known for other in others if (known := other.figures.get(name)) is not None],
        )
        off[name] = None
        if ours is not None and len(theirs) == len(others):
            middle = median(theirs)
            off[name] = 100 * (ours - middle if name in _RATES else ours / middle - 1)
    turns = sorted(set(one.ttft_ms).intersection(*(other.ttft_ms for other in others)))
    sizes = [abs(one.ttft_ms[turn] / median([other.ttft_ms[turn] for other in others]) - 1) for turn in turns]
    return {**off, TTFT: 100 * fmean(sizes) if sizes else None}


def real_against_real(repeats: Sequence[Observed]) -> Errors | None:
    """The mean size of each repeat's errors against the others."""
    if len(repeats) < 2:
        return None
    return mean_of(errors_of(one, [*repeats[:place], *repeats[place + 1 :]]) for place, one in enumerate(repeats))


def mean_of(errors: Iterable[Errors]) -> Errors:
    """Mean sizes, with the sign of the mean; None where one of them is."""
    each = list(errors)
    found: dict[str, float | None] = {}
    for name in each[0]:
        known = [value for one in each if (value := one.get(name)) is not None]
        found[name] = copysign(fmean(map(abs, known)), fmean(known)) if len(known) == len(each) else None
    return found


def fidelity_here(store: ResultsStore, sweep_id: int) -> RenderableType | None:
    """The table and the verdict of a sweep that ran on a machine and on its profile; None for any other."""
    trials = [job.trial for job in store.trials_of_sweep(sweep_id) if job.trial is not None]
    if len({trial.simulated for trial in trials}) < 2:
        return None
    compared = compare(Frame(store, sweep_id))
    if not compared:
        return None
    heads = {**_RATES, FLOW: "tok/s", TTFT: "TTFT"}
    lines = []
    for one in compared:
        line = {"": one.place, "n": str(one.repeats)}
        for name, head in heads.items():
            ours, theirs = one.simulated.get(name), (one.real or {}).get(name)
            shown = NONE if ours is None else f"{ours:{'' if name == TTFT else '+'}.1f}"
            line[head] = f"{shown}/{NONE if theirs is None else f'{abs(theirs):.1f}'}"
        lines.append(line)
    table = grid(lines, "This machine's simulation, against the machine", fold=True)
    return Group(table, _LEGEND, verdict(compared))


def compare(found: Frame) -> list[Compared]:
    """Each place of the sweep's other axes; none where no trial goes by a profile. A place that lacks one of the two has no
    errors, and so is not within the limits."""
    compared, both = [], False
    for group in found.groups(_AXIS):
        for baseline, trials in group.trials.items():
            for seed in sorted({trial.seed for trial in trials}):
                own = [trial for trial in trials if trial.seed == seed]
                real = [trial for trial in own if not trial.simulated]
                simulated = [trial for trial in own if trial.simulated and _profile_of(trial) is not None]
                place = ", ".join(filter(None, (group.name, baseline, f"seed {seed}")))
                observed = [_observed(found, trial) for trial in real]
                errors: Errors = {}
                if real and simulated:
                    errors = mean_of(errors_of(_observed(found, one), observed) for one in simulated)
                again = real_against_real(observed)
                compared.append(Compared(place, len(real), errors, again, _unpaired(real, simulated)))
                both = both or bool(real and simulated)
    return compared if both else []


def _unpaired(real: Sequence[Trial], simulated: Sequence[Trial]) -> int:
    measured = {trial.repeat: (trial.engine or {}).get(MEASURED_AT) for trial in real}
    if not any(measured.values()):
        return 0
    return sum(measured.get(one.repeat) != (_profile_of(one) or {}).get("measured", {}).get("at") for one in simulated)


def verdict(compared: Sequence[Compared]) -> str:
    limits = f"{HIT_POINTS:g} point of hit rate, {THROUGHPUT_PCT:g} % of throughput, {TTFT_PCT:g} % of TTFT"
    outside = [one for one in compared if one.unpaired or not within(one.simulated)]
    text = (
        f"Verdict: holds. All {len(compared)} places are within {limits}."
        if not outside
        else f"Verdict: fails at {len(outside)} of {len(compared)} places: {'; '.join(one.place for one in outside)}. The "
        f"limits are {limits}."
    )
    if unpaired := sum(one.unpaired for one in compared):
        text += (
            f" {unpaired} simulations go by a profile that the real trial of their repeat did not measure: force=true runs "
            "them all anew."
        )
    if wrong := [one.place for one in outside if _decides_wrongly(one)]:
        text += f" Hit rates are off at {len(wrong)} of them, where the machine's own repeats agree: what is evicted differs."
    restless = [one for one in compared if one.real is not None and not within(one.real)]
    if restless:
        text += (
            f" At {len(restless)} places the machine differs from itself by more than the limits (real again): it was busy, "
            "and the milliseconds there decide nothing."
        )
    few = min(one.repeats for one in compared)
    if few < FEWEST_REPEATS:
        text += f" {few} real repeats at some place, and {FEWEST_REPEATS} are asked for: repeat=0,1,2,3,4."
    return text


def _decides_wrongly(one: Compared) -> bool:
    """Hit rates that differ although the real repeats agree on them."""
    ours, theirs = furthest_rate(one.simulated), furthest_rate(one.real or {})
    return ours is not None and abs(ours) > HIT_POINTS and (theirs is None or abs(theirs) <= HIT_POINTS)


def _observed(found: Frame, trial: Trial) -> Observed:
    return Observed(
        figures={**{name: found.metric(trial, name) for name in _RATES}, FLOW: found.metric(trial, FLOW) or None},
        ttft_ms=_by_turn(found, trial),
    )


def _by_turn(found: Frame, trial: Trial) -> ByTurn:
    values = values_of(found.turns([trial]), "ttft_ms")
    sessions, turns = (values.index.get_level_values(name) for name in ("session", "turn"))
    return {(str(session), int(turn)): ms for session, turn, ms in zip(sessions, turns, values.tolist(), strict=True)}


def _profile_of(trial: Trial) -> Mapping[str, Any] | None:
    """What a simulated trial's record says of the profile that it goes by."""
    cost = (trial.engine or {}).get("cost") or {}
    return cost if cost.get("kind") == "machine profile" else None
