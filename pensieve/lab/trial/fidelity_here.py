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

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from pensieve.lab.results.frame import Frame, values_of
from pensieve.lab.results.schema import Trial
from pensieve.lab.results.store import ResultsStore
from pensieve.lab.statistics import median

HIT_POINTS, THROUGHPUT_PCT, TTFT_PCT = 1.0, 5.0, 10.0
"""What each error may come to: hit rates in points, by tier; output tokens a second; first tokens, mean over turns."""
FEWEST_REPEATS = 5
_RATES = {"gpu_hit_rate": "GPU", "cpu_hit_rate": "CPU", "miss_rate": "missed"}
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


@dataclass(frozen=True, slots=True)
class Observed:
    """One trial. rates: of _RATES, as shares; None where there was no history."""

    rates: tuple[float | None, ...]
    throughput: float | None
    ttft_ms: ByTurn


@dataclass(frozen=True, slots=True)
class Errors:
    """rates: of _RATES, in points; throughput, ttft: in percent. None: cannot be told."""

    rates: tuple[float | None, ...]
    throughput: float | None
    ttft: float | None

    @property
    def hits(self) -> float | None:
        """The furthest rate."""
        return max((rate for rate in self.rates if rate is not None), key=abs, default=None)

    def within(self) -> bool:
        """Hits may be unknown, where there is no history; what has no throughput or no first tokens is not within."""
        limits = zip(
            (self.hits or 0.0, self.throughput, self.ttft), (HIT_POINTS, THROUGHPUT_PCT, TTFT_PCT), strict=True
        )
        return all(error is not None and abs(error) <= limit for error, limit in limits)


_UNKNOWN = Errors((None,) * len(_RATES), None, None)


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


def median_of(trials: Sequence[Observed]) -> Observed:
    """The median of each figure over trials; None, or left out, where one of them lacks it."""
    flows = [trial.throughput for trial in trials if trial.throughput]
    rates = [
        [rate for rate in same if rate is not None] for same in zip(*(trial.rates for trial in trials), strict=True)
    ]
    common = set(trials[0].ttft_ms).intersection(*(trial.ttft_ms for trial in trials[1:]))
    return Observed(
        rates=tuple(median(known) if len(known) == len(trials) else None for known in rates),
        throughput=median(flows) if len(flows) == len(trials) else None,
        ttft_ms={turn: median([trial.ttft_ms[turn] for trial in trials]) for turn in sorted(common)},
    )


def errors_of(one: Observed, others: Sequence[Observed]) -> Errors:
    """Of a trial against the median of others. ttft: mean absolute percentage error over the turns that all have."""
    middle = median_of(others)
    beside = zip(one.rates, middle.rates, strict=True)
    off = [abs(ms / middle.ttft_ms[turn] - 1) for turn, ms in one.ttft_ms.items() if turn in middle.ttft_ms]
    return Errors(
        rates=tuple(None if ours is None or theirs is None else 100 * (ours - theirs) for ours, theirs in beside),
        throughput=100 * (one.throughput / middle.throughput - 1) if one.throughput and middle.throughput else None,
        ttft=100 * fmean(off) if off else None,
    )


def real_against_real(repeats: Sequence[Observed]) -> Errors | None:
    """The mean size of each repeat's errors against the others."""
    if len(repeats) < 2:
        return None
    return mean_of(errors_of(one, [*repeats[:place], *repeats[place + 1 :]]) for place, one in enumerate(repeats))


def mean_of(errors: Iterable[Errors]) -> Errors:
    """Mean sizes, with the sign of the mean; None where one of them is."""
    each = list(errors)
    return Errors(
        rates=tuple(map(_mean_size, zip(*(one.rates for one in each), strict=True))),
        throughput=_mean_size(one.throughput for one in each),
        ttft=_mean_size(one.ttft for one in each),
    )


def fidelity_here(store: ResultsStore, sweep_id: int) -> RenderableType | None:
    """The table and the verdict of a sweep that ran on a machine and on its profile; None for any other."""
    trials = [job.trial for job in store.trials_of_sweep(sweep_id) if job.trial is not None]
    if len({trial.simulated for trial in trials}) < 2:
        return None
    compared = compare(Frame(store, sweep_id))
    if not compared:
        return None
    table = Table(
        title="This machine's simulation, against the machine",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("", overflow="fold", min_width=10)
    for name in ("n", *_RATES.values(), "tok/s", "TTFT"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in compared:
        real = one.real or _UNKNOWN
        beside = zip((*one.simulated.rates, one.simulated.throughput), (*real.rates, real.throughput), strict=True)
        cells = [f"{_signed(ours)}/{_plain(theirs)}" for ours, theirs in beside]
        table.add_row(one.place, str(one.repeats), *cells, f"{_plain(one.simulated.ttft)}/{_plain(real.ttft)}")
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
                errors = _UNKNOWN
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
    outside = [one for one in compared if one.unpaired or not one.simulated.within()]
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
    restless = [one for one in compared if one.real is not None and not one.real.within()]
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
    ours, theirs = one.simulated.hits, one.real.hits if one.real else None
    return ours is not None and abs(ours) > HIT_POINTS and (theirs is None or abs(theirs) <= HIT_POINTS)


def _observed(found: Frame, trial: Trial) -> Observed:
    return Observed(
        rates=tuple(found.metric(trial, name) for name in _RATES),
        throughput=found.metric(trial, "throughput_output_tok_s"),
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


def _mean_size(values: Iterable[float | None]) -> float | None:
    found = list(values)
    known = [value for value in found if value is not None]
    return copysign(fmean(map(abs, known)), fmean(known)) if known and len(known) == len(found) else None


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.1f}"


def _plain(value: float | None) -> str:
    return "–" if value is None else f"{abs(value):.1f}"
