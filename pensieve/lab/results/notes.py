"""What a reader should know of a sweep's numbers: a note for each thing that applies, by its code.

TEXTS has the sentence of each code. A rule decides only whether a code holds, and for which baselines and settings.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from pensieve.lab.metrics import metric_of
from pensieve.lab.results.frame import (
    CONVERSATION,
    OURS,
    REFERENCE,
    UNEQUAL_RATE,
    Frame,
    Panel,
    footer,
    mixtures,
)
from pensieve.lab.results.schema import Trial
from pensieve.lab.statistics import FEWEST_GROUPS
from pensieve.lab.workload.base import BYTE_TOKENS, byte_notes, context_cuts, cut_by_context
from pensieve.specs import ROUNDS_APART
from pensieve.units import percent

NOTE_COLUMNS = ("ttft_ms", "queue_ms")
"""The turns' columns that `notes` reads."""
MOSTLY = 0.5
"""Of the time to first token: who waits longer than that in the queue asks a machine at or past saturation."""
_BUSY = 0.1  # of the CPUs' time, spent by others
_SHOWN = 4  # places that a note names

ABOVE = {
    "sweep_running": "The sweep is running: {}.",
    "trials_missing": "{} trials did not complete. Type the same command again to run them.",
    "do_not_compare": "Do not compare times here: the sweep holds {}.",
    "mostly_lost": "Too few turns completed to compare: {}.",
    "tokens_are_bytes": BYTE_TOKENS,
    "context_cut": context_cuts("{}"),
}
"""Stand above a table, in this order: without these its numbers would be taken for something else. The others are behind
`results.py notes`."""

WINDOW = ("window", "not_steady", "late_warmup", "none_in_window", "few_turns", "halves")
"""Flags of a trial that qualify its throughput."""

QUALIFY = {
    "throughput_window": "What trials flag of the window of their throughput (see their `flags`): {}.",
    "turns_without_reply": "Turns that did not complete: {}. They are in no latency and no hit rate, so what is left may be "
    "easier.",
    "near_saturation": "Near saturation: most of the last turn's TTFT is queueing (medians): {}. Ratios to these grow with "
    "the load.",
    "less_finished": "Less of the offered load was finished (requests/s): {}. Latencies are not at equal rates.",
    "slower_at": "Pensieve is behind (means of trials): {}.",
    "one_seed": "One seed: intervals are over its conversations, on one machine at one time.",
    "few_seeds": f"{{}} seeds: no intervals below {FEWEST_GROUPS}. Add seed=0,1,2,3,4.",
    "nothing_evicted": "Nothing was evicted: every conversation fitted into the GPU tier. To see eviction, add conversations "
    "or lower cache.gpu.",
    "busy_machine": "Other programs used {} of the CPU time: times are longer by it.",
    "not_completed": "Not completed: {}.",
    "outputs_differ": "Outputs differ from {}. A margin near 0 is a tie; in float32 a larger one is a fault.",
    "outputs_differ_16_bits": f"Outputs differ from {{}}. {ROUNDS_APART}",
    "outputs_not_compared": "Outputs were not compared everywhere: {}.",
}

FACTS = {
    "simulated": "Simulated on {}: times come from a cost model; hits and misses are those of the real cache.",
    "random_weights": "Random weights: text is meaningless, speed is that of the architecture.",
    "served_by": "{}",
    "load": "{}",
    "bound": "Offline bound on the hit rate at this capacity, in %: {}.",
    "outputs_agree": "Outputs of all baselines agree in {}.",
}
"""Say what ran, and qualify no number: a table does not count them."""

TEXTS = {**ABOVE, **QUALIFY, **FACTS}


@dataclass(frozen=True, slots=True)
class Note:
    code: str
    where: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The first places for {}."""
        more = len(self.where) - _SHOWN
        between = "; " if any(", " in place for place in self.where) else ", "
        return TEXTS[self.code].format(between.join(self.where[:_SHOWN]) + (f" and {more} more" if more > 0 else ""))

    @property
    def above(self) -> bool:
        """It stands above the table."""
        return self.code in ABOVE


Told = Iterator[tuple[str, str]]
"""(code, place): where it holds, for {} in its text."""


def notes(found: Frame, panels: Sequence[Panel]) -> list[Note]:
    """All that apply to the sweep, those above the table first."""
    return noted(told for rule in _RULES for told in rule(found, panels))


def noted(told: Iterable[tuple[str, str]]) -> list[Note]:
    """A note for each code, with its places."""
    places: dict[str, list[str]] = {}
    for code, place in told:
        places.setdefault(code, []).append(place)
    apart = ("do_not_compare", "served_by")  # sentences
    return [
        Note(code, tuple(some))
        for code, own in places.items()
        for some in ([[one] for one in own] if code in apart else [own])
    ]


def _missing(found: Frame, _panels: Sequence[Panel]) -> Told:
    """How many trials of the sweep have nothing to show: everything said is of the others."""
    expected = max(found.sweep.n_expected, len(found.jobs))
    count = expected - len(found.trials)
    if count and found.sweep.status == "running":
        lost = sum(job.trial is None and job.last.status != "running" for job in found.jobs)
        yield "sweep_running", f"{count - lost} of {expected} trials have not ended, {lost} did not complete"
    elif count:
        yield "trials_missing", f"{count} of {expected}"


def _not_comparable(_found: Frame, panels: Sequence[Panel]) -> Told:
    """What the trials of a setting mix. That an axis sweeps hardware or weights is no mixture."""
    beside = [[trial for own in panel.trials.values() for trial in own] for panel in panels]
    every = dict.fromkeys(f"{one.what}. Remedy: {one.remedy}" for trials in beside for one in mixtures(trials))
    yield from (("do_not_compare", text) for text in every)


def _lost_most(found: Frame, panels: Sequence[Panel]) -> Told:
    for panel in panels:
        for name, (done, asked) in found.mostly_lost(panel).items():
            yield "mostly_lost", f"{panel.place(name)} {done:,} of {asked:,}"


def load_changed(panels: Sequence[Panel]) -> Told:
    """What makes the load another one than was meant: lengths in bytes, conversations that the model's context cuts.
    Baselines of a panel have the same conversations by seed, which count once."""
    if any(byte_notes(plan_of(trial)) for _, _, trials in _cells(panels) for trial in trials):
        yield "tokens_are_bytes", ""
    told: dict[str, list[str]] = {}
    for panel in panels:
        each = {trial.seed: plan_of(trial) for trials in panel.trials.values() for trial in trials}
        told.setdefault(cut_by_context(each.values()), []).append(panel.text)
    for said, names in told.items():
        if said:
            yield "context_cut", f"({names[0]}) {said}" if len(told) > 1 else said


def plan_of(trial: Trial) -> Mapping[str, Any]:
    """What the workload said of itself."""
    plan = (trial.engine or {}).get("workload")
    return plan if isinstance(plan, Mapping) else {}


def _turns_without_reply(found: Frame, panels: Sequence[Panel]) -> Told:
    for panel, name, trials in _cells(panels):
        if less := found.incomplete(trials):
            turns = less.total() + found.completed_turns(trials)
            each = ", ".join(f"{count:,} {status}" for status, count in less.items())
            yield "turns_without_reply", f"{panel.place(name)} {less.total():,} of {turns:,} ({each})"


def _near_saturation(found: Frame, panels: Sequence[Panel]) -> Told:
    """Medians over each conversation's last turn."""
    for panel, name, trials in _cells(panels):
        turns = found.turns(trials)
        both = turns[["queue_ms", "ttft_ms"]].dropna().sort_index()
        last = both.groupby(level=CONVERSATION).tail(1).query("ttft_ms > 0")
        if not last.empty and (last["queue_ms"] / last["ttft_ms"]).median() > MOSTLY:
            waited, all_of_it = last["queue_ms"].median(), last["ttft_ms"].median()
            yield "near_saturation", f"{panel.place(name)} {waited:,.0f} of {all_of_it:,.0f} ms"


def _less_finished(found: Frame, panels: Sequence[Panel]) -> Told:
    """Baselines that finished less of an open load than another did with the same seeds."""
    for panel in panels:
        rates = {name: own for name, trials in panel.trials.items() if (own := _steady_rates(found, trials))}
        for name, own in rates.items():
            both = {other: _over_same_seeds(own, of) for other, of in rates.items() if own.keys() & of.keys()}
            other, (rate, most) = max(both.items(), key=lambda one: one[1][1] - one[1][0])
            if _clearly_less(rate, most):
                yield "less_finished", f"{panel.place(name)} {rate:.3g}, {other} {most:.3g} with the same seeds"


def _clearly_less(rate: float, other: float) -> bool:
    return rate < (1 - UNEQUAL_RATE) * other


def _over_same_seeds(one: Mapping[int, float], other: Mapping[int, float]) -> tuple[float, float]:
    seeds = one.keys() & other.keys()
    return fmean(one[seed] for seed in seeds), fmean(other[seed] for seed in seeds)


def _steady_rates(found: Frame, trials: Sequence[Trial]) -> dict[int, float]:
    """By seed the mean throughput in requests/s over the window, under a load that does not wait for replies to begin
    conversations; empty under another."""
    if any(not _load_decides(trial) or "window" in trial.flags for trial in trials):
        return {}
    return found.by_seed(trials, "throughput_req_s")


def _load_decides(trial: Trial) -> bool:
    """How much there is to do, and not the replies, for which a closed load waits."""
    return bool(trial.flags.get("load", "closed") != "closed")


def _slower_at(found: Frame, panels: Sequence[Panel]) -> Told:
    """At what Pensieve is behind another baseline with every seed: the headline is of the first token alone. How many tokens
    are made under an open load is the load's."""
    for panel, other, theirs in _cells(panels):
        ours = panel.trials.get(OURS, ())
        asked = {"tpot_ms_mean": "TPOT {:.3g} ms"}
        if not any(_load_decides(trial) for trial in (*ours, *theirs)):
            asked["throughput_output_tok_s"] = "{:.3g} output tokens/s"
        for name, text in asked.items():
            a, b = found.by_seed(ours, name), found.by_seed(theirs, name)
            both = [(a[seed], b[seed]) for seed in a.keys() & b.keys()]
            lower = metric_of(name).better == "lower"
            if both and all(_clearly_less(*((y, x) if lower else (x, y))) for x, y in both):
                own, others = _over_same_seeds(a, b)
                yield "slower_at", f"{text.format(own)}, {panel.place(other)} {others:.3g}"


def _few(found: Frame, _panels: Sequence[Panel]) -> Told:
    seeds = len({trial.seed for trial in found.trials})
    if seeds == 1:
        yield "one_seed", ""
    elif 1 < seeds < FEWEST_GROUPS:
        yield "few_seeds", str(seeds)


def _nothing_evicted(found: Frame, _panels: Sequence[Panel]) -> Told:
    """Pensieve that never evicted says nothing about its tiers."""
    ours = [trial for trial in found.trials if trial.baseline == OURS]
    if ours and all(found.metric(trial, name) == 0 for trial in ours for name in ("evicted_chunks", "dropped_chunks")):
        yield "nothing_evicted", ""


def _machine(found: Frame, _panels: Sequence[Panel]) -> Told:
    shares = [float(trial.flags["others_cpu_share"]) for trial in found.trials if "others_cpu_share" in trial.flags]
    if shares and max(shares) > _BUSY:
        yield "busy_machine", f"{median(shares):.0%} (at most {max(shares):.0%})"


def _what_ran(found: Frame, panels: Sequence[Panel]) -> Told:
    """bound: of one setting; of several it is a column. A server that stores nothing has none."""
    trials = found.trials
    yield from (("simulated", name) for name in sorted({trial.hardware for trial in trials if trial.simulated}))
    if any(trial.weights == "random" for trial in trials):
        yield "random_weights", ""
    yield from (("served_by", text) for text in footer(trials))
    if load := load_line(trials):
        yield "load", load
    for name, own in panels[0].trials.items() if len(panels) == 1 else ():
        if name != REFERENCE and (bound := found.mean(own, "bound_hit_rate")) is not None:
            yield "bound", f"{name} {percent(bound)}"


def _window(found: Frame, _panels: Sequence[Panel]) -> Told:
    """What qualifies the throughput column: each flag, with the trials that have it by baseline."""
    totals = Counter(trial.baseline for trial in found.trials)
    for flag in WINDOW:
        flagged = Counter(trial.baseline for trial in found.trials if flag in trial.flags)
        each = ", ".join(f"{name} {count} of {totals[name]}" for name, count in flagged.items())
        if flagged:
            yield "throughput_window", f"{flag} ({'all trials' if flagged == totals else each})"


def _failures(found: Frame, _panels: Sequence[Panel]) -> Told:
    for one in (job.last for job in found.jobs if job.last.status not in ("completed", "running")):
        why = f": {one.error}".rstrip(".") if one.error else ""
        yield "not_completed", f"{one.baseline}, seed {one.seed}, {one.status}{why}"


_RULES: Sequence[Callable[[Frame, Sequence[Panel]], Told]] = (
    _missing, _not_comparable, _lost_most, lambda _, panels: load_changed(panels), _turns_without_reply,
    _near_saturation, _less_finished, _slower_at, _few, _nothing_evicted, _machine, _what_ran, _window, _failures,
)  # fmt: skip


_LOAD = {
    "sessions": "conversations",
    "message_tokens_mean": "tokens a message",
    "reply_tokens_mean": "a reply",
    "think_time_s": "s of think time",
    "think_time_cap_s": "s of it at most",
    "request_interval_s": "s between arrivals",
}


def load_line(trials: Sequence[Trial]) -> str | None:
    """What was asked: the load's kind and rate, and the lengths of conversations, messages and replies."""
    plans, parts = [plan for trial in trials if (plan := plan_of(trial))], []
    for name, words in _LOAD.items():
        if values := [float(plan[name]) for plan in plans if isinstance(plan.get(name), int | float)]:
            ends = dict.fromkeys(f"{end:,.4g}" for end in (min(values), max(values)))
            parts.append(f"{' to '.join(ends)} {words}")
    kinds = [
        kind for name in ("load", "replies") for kind in sorted({str(plan[name]) for plan in plans if name in plan})
    ]
    return f"Load ({', '.join(kinds)}): {', '.join(parts)}." if kinds else None


def _cells(panels: Sequence[Panel]) -> list[tuple[Panel, str, Sequence[Trial]]]:
    return [(panel, name, trials) for panel in panels for name, trials in panel.trials.items()]
