"""What a reader should know of a sweep's numbers: one note for each thing that applies, by its code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from pensieve.lab.metric_registry import metric_of
from pensieve.lab.results.compare_trials import UNEQUAL_RATE
from pensieve.lab.results.frame import CONVERSATION, OURS, REFERENCE, Frame, TrialGroup, conversations_of, values_of
from pensieve.lab.results.schema import Trial
from pensieve.lab.results.trials import footer, mixtures
from pensieve.lab.statistics import FEWEST_GROUPS, enough_for
from pensieve.lab.window import HALVES_MAY_DIFFER
from pensieve.lab.workload.base import byte_notes, context_cuts, cut_by_context
from pensieve.units import percent

if TYPE_CHECKING:
    import pandas as pd

NOTE_COLUMNS = ("ttft_ms", "queue_ms")
"""The turns' columns that `notes` reads."""
MOSTLY = 0.5
"""Of the time to first token: who waits longer than that in the queue asks a machine at or past saturation."""
_BUSY = 0.1  # of the CPUs' time, spent by others
_MODEL_OFF_PCT = 50.0
_SHOWN = 4  # places that a note names

ABOVE = ("sweep_running", "trials_missing", "do_not_compare", "mostly_lost", "tokens_are_bytes", "context_cut")
"""Codes of the notes that stand above a table, in this order: without these its numbers would be taken for something else.
The others are behind `results.py notes`."""

FACTS = (
    "simulated",
    "random_weights",
    "served_by",
    "load",
    "budgets",
    "warm_up",
    "outputs_agree",
    "bound",
    "gap_closed",
)
"""Codes of notes that say what ran, and qualify no number: a table does not count them."""

_WINDOW = {
    "window": "Throughput is over all measured turns, with start-up and drain: the load is too small for a window",
    "not_steady": "The window began before three mean conversation durations had passed",
    "late_warmup": "Warm-up turns were still running when the window began",
    "none_in_window": "No turn finished in the window, so there is no throughput",
    "few_turns": "Few turns finished in the window",
    "halves": f"The halves of the window differ by over {HALVES_MAY_DIFFER:.0%} in output tokens",
}
"""Flags of a trial that qualify its throughput."""


@dataclass(frozen=True, slots=True)
class Note:
    code: str
    text: str

    @property
    def above(self) -> bool:
        """It stands above the table."""
        return self.code in ABOVE


def notes(found: Frame, groups: Sequence[TrialGroup]) -> list[Note]:
    """All that apply to the sweep, those above the table first."""
    made = [*missing(found), *not_comparable(groups), *_lost_most(found, groups), *load_changed(groups)]
    for rule in _RULES:
        made += rule(found, groups)
    return made


def _where(code: str, places: Sequence[str], text: str, between: str = ", ") -> Iterator[Note]:
    """A note with the first of these places for {}; none without any."""
    more = len(places) - _SHOWN
    if places:
        yield Note(code, text.format(between.join(places[:_SHOWN]) + (f" and {more} more" if more > 0 else "")))


def missing(found: Frame) -> Iterator[Note]:
    """How many trials of the sweep have nothing to show: everything said is of the others."""
    expected = max(found.sweep.n_expected, len(found.jobs))
    count = expected - len(found.trials)
    if count and found.sweep.status == "running":
        lost = sum(job.trial is None and job.last.status != "running" for job in found.jobs)
        what = f"{count - lost} of {expected} trials have not ended, {lost} did not complete"
        yield Note("sweep_running", f"The sweep is running: {what}.")
    elif count:
        what = f"{count} of {expected} trials did not complete"
        yield Note("trials_missing", f"{what}. Type the same command again to run them.")


def not_comparable(groups: Sequence[TrialGroup]) -> Iterator[Note]:
    """What the trials of a setting mix. That an axis sweeps hardware or weights is no mixture."""
    beside = [[trial for own in group.trials.values() for trial in own] for group in groups]
    for what, remedy in dict.fromkeys((one.what, one.remedy) for trials in beside for one in mixtures(trials)):
        yield Note("do_not_compare", f"Do not compare times here: the sweep holds {what}. Remedy: {remedy}.")


def load_changed(groups: Sequence[TrialGroup]) -> Iterator[Note]:
    """What makes the load another one than was meant: lengths in bytes, conversations that the model's context cuts.
    Baselines of a group have the same conversations by seed, which count once."""
    plans = [plan_of(trial) for group in groups for trials in group.trials.values() for trial in trials]
    for text in dict.fromkeys(text for plan in plans for text in byte_notes(plan)):
        yield Note("tokens_are_bytes", text)
    told: dict[str, list[str]] = {}
    for group in groups:
        each = {trial.seed: plan_of(trial) for trials in group.trials.values() for trial in trials}
        told.setdefault(cut_by_context(each.values()), []).append(group.name)
    if any(told):
        places = [f"({names[0]}) {said}" if len(told) > 1 else said for said, names in told.items() if said]
        yield from _where("context_cut", places, context_cuts("{}"), "; ")


def plan_of(trial: Trial) -> Mapping[str, Any]:
    """What the workload said of itself."""
    plan = (trial.engine or {}).get("workload")
    return plan if isinstance(plan, Mapping) else {}


def offered_rate(trials: Sequence[Trial]) -> float | None:
    """Requests a second that the trials were offered in steady state (their mean); None where replies alone decide the rate,
    or the record of one does not say."""
    rates = [plan_of(trial).get("request_rate_per_s") for trial in trials]
    known = [float(rate) for rate in rates if rate is not None]
    return fmean(known) if known and len(known) == len(rates) else None


def starting(trials: Sequence[Trial]) -> bool:
    """Whether an open load was still filling up when the window began: the offered rate is that of steady state."""
    return any("not_steady" in trial.flags for trial in trials)


def _lost_most(found: Frame, groups: Sequence[TrialGroup]) -> Iterator[Note]:
    where = [
        f"{_place(group, name)} {done:,} of {asked:,}"
        for group in groups
        for name, (done, asked) in found.mostly_lost(group).items()
    ]
    yield from _where("mostly_lost", where, "Too few turns completed to compare: {}.")


# -- one rule for each thing behind `results.py notes` ------------------------------------------------------------------


def _turns_without_reply(found: Frame, groups: Sequence[TrialGroup]) -> Iterator[Note]:
    lost = []
    for group, name, trials in _all(groups):
        if less := found.incomplete(trials):
            turns = less.total() + sum(int(found.metric(trial, "turns", "completed") or 0) for trial in trials)
            each = ", ".join(f"{count:,} {status}" for status, count in less.items())
            lost.append(f"{_place(group, name)} {less.total():,} of {turns:,} ({each})")
    easier = "They are in no latency and no hit rate, so what is left may be easier."
    yield from _where("turns_without_reply", lost, f"Turns that did not complete: {{}}. {easier}", "; ")


def _waiting(found: Frame, groups: Sequence[TrialGroup]) -> Iterator[Note]:
    late = []
    for group, name, trials in _all(groups):
        last = _last_turns(found, trials)
        if _mostly_wait(last):
            waited, ttft = last["queue_ms"].median(), last["ttft_ms"].median()
            late.append(f"{_place(group, name)} {waited:,.0f} of {ttft:,.0f} ms")
    text = (
        "Near saturation: most of the last turn's TTFT is queueing (medians): {}. Ratios to these grow with the load."
    )
    yield from _where("near_saturation", late, text)


def _last_turns(found: Frame, trials: Sequence[Trial]) -> pd.DataFrame:
    """`queue_ms` and `ttft_ms` of each conversation's last turn."""
    import pandas as pd

    turns = found.turns(trials)
    both = pd.concat([values_of(turns, "queue_ms"), values_of(turns, "ttft_ms")], axis=1, join="inner")
    last = both.sort_index().groupby(level=CONVERSATION).tail(1)
    return last[last["ttft_ms"] > 0]


def _mostly_wait(last: pd.DataFrame) -> bool:
    return not last.empty and bool((last["queue_ms"] / last["ttft_ms"]).median() > MOSTLY)


def _less_finished(found: Frame, groups: Sequence[TrialGroup]) -> Iterator[Note]:
    """Baselines that finished less of an open load than another did with the same seeds, or less than was offered while most
    of the time was waiting. Without waiting, less than the nominal rate is chance: it is not told."""
    less = []
    for group in groups:
        rates = {name: own for name, trials in group.trials.items() if (own := _steady_rates(found, trials))}
        for name, own in rates.items():
            trials = group.trials[name]
            rate, offered = fmean(own.values()), None if starting(trials) else offered_rate(trials)
            if offered is not None and _clearly_less(rate, offered) and _mostly_wait(_last_turns(found, trials)):
                less.append(f"{_place(group, name)} {rate:.3g} of {offered:.3g} offered")
                continue
            both = {other: _over_same_seeds(own, of) for other, of in rates.items() if own.keys() & of.keys()}
            other, (rate, most) = max(both.items(), key=lambda one: one[1][1] - one[1][0])
            if _clearly_less(rate, most):
                less.append(f"{_place(group, name)} {rate:.3g}, {other} {most:.3g} with the same seeds")
    text = "Less of the offered load was finished (requests/s): {}. Latencies are not at equal rates."
    yield from _where("less_finished", less, text, "; ")


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


def _slower_at(found: Frame, groups: Sequence[TrialGroup]) -> Iterator[Note]:
    """At what Pensieve is behind another baseline with every seed: the headline is of the first token alone. How many tokens
    are made under an open load is the load's."""
    slower = []
    for group, other, theirs in _all(groups):
        ours = group.trials.get(OURS, ())
        asked = {"tpot_ms_mean": "TPOT {:.3g} ms"}
        if not any(_load_decides(trial) for trial in (*ours, *theirs)):
            asked["throughput_output_tok_s"] = "{:.3g} output tokens/s"
        for name, text in asked.items():
            a, b = found.by_seed(ours, name), found.by_seed(theirs, name)
            both = [(a[seed], b[seed]) for seed in a.keys() & b.keys()]
            lower = metric_of(name).better == "lower"
            if both and all(_clearly_less(*((y, x) if lower else (x, y))) for x, y in both):
                own, others = _over_same_seeds(a, b)
                slower.append(f"{text.format(own)}, {_place(group, other)} {others:.3g}")
    yield from _where("slower_at", slower, "Pensieve is behind (means of trials): {}.", "; ")


def _caches(_found: Frame, groups: Sequence[TrialGroup]) -> Iterator[Note]:
    """Servers that ran before a trial: of those that say what they held, see trials.mixtures."""
    flag, places = "cache_state_unverified", []
    for group, name, trials in _all(groups):
        said = [str(trial.flags[flag]).rstrip(".") for trial in trials if flag in trial.flags]
        places += [f"{_place(group, name)}: {said[0]}"] if said else []
    yield from _where("cache_not_verified", places, "Nobody can tell whether the cache was as declared: {}.", "; ")


def _few(found: Frame, groups: Sequence[TrialGroup]) -> Iterator[Note]:
    seeds = len({trial.seed for trial in found.trials})
    if seeds == 1:
        yield Note("one_seed", "One seed: intervals are over its conversations, on one machine at one time.")
    elif 1 < seeds < FEWEST_GROUPS:
        yield Note("few_seeds", f"{seeds} seeds: no intervals below {FEWEST_GROUPS}. Add seed=0,1,2,3,4.")
    ttft = [values_of(found.turns(trials), "ttft_ms") for _, _, trials in _all(groups)]
    fewest = min((len(conversations_of(one).unique()) for one in ttft), default=0)
    if 0 < fewest < (least := enough_for(0.5)):
        text = f"Medians rest on {fewest} conversations; another few would move them below {least}."
        yield Note("few_conversations", text)
    fewest = min((len(values_of(found.turns([trial]), "ttft_ms")) for trial in found.trials), default=0)
    if 0 < fewest < (least := enough_for(0.99)):
        text = f"p99 rests on {fewest} turns a trial; below {least:,} it is little but the maximum."
        yield Note("few_turns_for_p99", text)


def _tiers(found: Frame, _groups: Sequence[TrialGroup]) -> Iterator[Note]:
    """Pensieve that never evicted, or never read back what it evicted, says nothing about its tiers."""
    ours = [trial for trial in found.trials if trial.baseline == OURS]
    counted = {
        name: [found.metric(trial, name) for trial in ours]
        for name in ("evicted_chunks", "dropped_chunks", "cpu_hit_rate")
    }
    none = {name: all(value == 0 for value in values) for name, values in counted.items()}
    if ours and none["evicted_chunks"] and none["dropped_chunks"]:
        text = "Nothing was evicted: every conversation fitted into the GPU tier. To see eviction, add conversations or"
        yield Note("nothing_evicted", f"{text} lower cache.gpu.")
    elif ours and none["cpu_hit_rate"] and None not in counted["evicted_chunks"] and not none["evicted_chunks"]:
        moved = sum(value or 0 for value in counted["evicted_chunks"])
        text = "nothing here shows what the CPU tier is worth. Add conversations that return, or raise cache.cpu."
        yield Note("cpu_tier_unused", f"{moved:,.0f} chunks left the GPU tier and none was read back: {text}")


def _machine(found: Frame, _groups: Sequence[TrialGroup]) -> Iterator[Note]:
    shares = [float(trial.flags["others_cpu_share"]) for trial in found.trials if "others_cpu_share" in trial.flags]
    if shares and max(shares) > _BUSY:
        text = f"Other programs used {median(shares):.0%} of the CPU time (at most {max(shares):.0%})"
        yield Note("busy_machine", f"{text}: times are longer by it.")
    worst: dict[str, float] = {}
    for trial in found.trials:
        error = found.metric(trial, "cost_model_error_pct")
        if error is not None and abs(error) > max(_MODEL_OFF_PCT, abs(worst.get(trial.baseline, 0.0))):
            worst[trial.baseline] = error
    where = [f"{name} {error:+.0f} %" for name, error in worst.items()]
    yield from _where("cost_model_off", where, "The cost model that eviction goes by was far from the measurement: {}.")


def _what_ran(found: Frame, _groups: Sequence[TrialGroup]) -> Iterator[Note]:
    trials = found.trials
    machines = sorted({trial.hardware for trial in trials if trial.simulated})
    text = "Simulated on {}: times come from a cost model; hits and misses are those of the real cache."
    yield from _where("simulated", machines, text)
    if any(trial.weights == "random" for trial in trials):
        yield Note("random_weights", "Random weights: text is meaningless, speed is that of the architecture.")
    yield from (Note("served_by", text) for text in footer(trials))
    if load := load_line(trials):
        yield Note("load", load)


def _window(found: Frame, _groups: Sequence[TrialGroup]) -> Iterator[Note]:
    """What qualifies the throughput column: a note for each flag, with the trials that have it by baseline."""
    trials = found.trials
    totals = Counter(trial.baseline for trial in trials)
    for flag, text in _WINDOW.items():
        flagged = Counter(trial.baseline for trial in trials if flag in trial.flags)
        if flagged:
            each = ", ".join(f"{name} {count} of {totals[name]}" for name, count in flagged.items())
            yield Note(flag, f"{text}: {'all trials' if flagged == totals else each}.")
    drained: dict[str, float] = {}
    for trial in trials:
        if (share := float(trial.flags.get("drain_share") or 0.0)) > 0:
            drained[trial.baseline] = max(share, drained.get(trial.baseline, 0.0))
    where = [f"{name} {share:.0%}" for name, share in drained.items()]
    yield from _where("drain", where, "Output tokens after the window, which throughput leaves out, at most: {}.")


def _bound(found: Frame, groups: Sequence[TrialGroup]) -> Iterator[Note]:
    """Of one setting; of several it is a column. A server that stores nothing has no bound."""
    if len(groups) == 1:
        bounds = {name: found.mean(trials, "bound_hit_rate") for name, trials in groups[0].trials.items()}
        known = [f"{name} {percent(one)}" for name, one in bounds.items() if one is not None and name != REFERENCE]
        yield from _where("bound", known, "Offline bound on the hit rate at this capacity, in %: {}.")


def _failures(found: Frame, _groups: Sequence[TrialGroup]) -> Iterator[Note]:
    lost = [job.last for job in found.jobs if job.last.status not in ("completed", "running")]
    each = [f"{t.baseline}, seed {t.seed}, {t.status}{f': {t.error}'.rstrip('.') if t.error else ''}" for t in lost]
    yield from _where("not_completed", each, "Not completed: {}.", "; ")


_RULES: Sequence[Callable[[Frame, Sequence[TrialGroup]], Iterator[Note]]] = (
    _turns_without_reply, _waiting, _less_finished, _slower_at, _caches, _few, _tiers, _machine, _what_ran,
    _window, _bound, _failures,
)  # fmt: skip


# -- what they are made of ----------------------------------------------------------------------------------------------


def load_line(trials: Sequence[Trial]) -> str | None:
    """What was asked: the load's kind and rate, and the lengths of conversations, messages and replies."""
    known = [plan for trial in trials if (plan := plan_of(trial))]
    parts = []
    for name, words in (
        ("sessions", "conversations"),
        ("message_tokens_mean", "tokens a message"),
        ("reply_tokens_mean", "a reply"),
        ("think_time_s", "s of think time"),
        ("think_time_cap_s", "s of it at most"),
        ("request_interval_s", "s between arrivals"),
    ):
        if values := [float(plan[name]) for plan in known if isinstance(plan.get(name), int | float)]:
            kinds = sorted(
                {str(plan["replies"]) for plan in known if name == "reply_tokens_mean" and "replies" in plan}
            )
            parts.append(f"{_range(values)} {words}" + (f" ({', '.join(kinds)})" if kinds else ""))
    load = ", ".join(sorted({str(plan["load"]) for plan in known if "load" in plan}))
    load += ", tokens are bytes" if load and any(byte_notes(plan) for plan in known) else ""
    return f"Load ({load}): {', '.join(parts)}." if load else None


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:,.4g}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:,.4g} to {high:,.4g}"


def _all(groups: Sequence[TrialGroup]) -> list[tuple[TrialGroup, str, Sequence[Trial]]]:
    return [(group, name, trials) for group in groups for name, trials in group.trials.items()]


def _place(group: TrialGroup, baseline: str) -> str:
    return f"{baseline} ({group.name})" if group.name else baseline
