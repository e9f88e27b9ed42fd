"""What would make a sweep's numbers mislead, as sentences that stand over its table: overload, few values, a busy machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from pensieve.results.compare_trials import UNEQUAL_RATE
from pensieve.results.frame import CONVERSATION, conversations_of, values_of
from pensieve.results.headline import OURS
from pensieve.results.schema import Sweep, Trial
from pensieve.results.store import JobResult
from pensieve.results.trials import Evidence, TrialGroup, mixtures
from pensieve.statistics import FEWEST_GROUPS, enough_for
from pensieve.workload.base import context_cuts, cut_by_context

if TYPE_CHECKING:
    import pandas as pd

CAVEAT_COLUMNS = ("ttft_ms", "queue_ms", "arrived_s", "finished_s")
"""The turns' columns that `caveats` reads."""
MOSTLY = 0.5
"""Of the time to first token: who waits longer than that in the queue asks a machine at or past saturation."""
_BUSY = 0.1  # of the CPUs' time, spent by others
_MODEL_OFF_PCT = 50.0
_FOUND_FULL = 0.1  # of the turns, from which on slots are said to limit a baseline
_SHOWN = 4  # places that a sentence names


def caveats(found: Evidence, groups: Sequence[TrialGroup]) -> list[str]:
    """What a reader has to know before the numbers."""
    return [
        *(without(found.sweep, found.jobs) if found.trials else ()),
        *_turns_without_reply(found, groups),
        *_mixed_groups(groups),
        *_waiting(found, groups),
        *_less_finished(found, groups),
        *_slower_at(found, groups),
        *_caches(groups),
        *_slots(found, groups),
        *_few(found, groups),
        *_tiers_unused(found),
        *_busy(found),
        *_model_off(found),
    ]


def cut_short(groups: Sequence[TrialGroup]) -> list[str]:
    """What the model's context took from the conversations: another load than was meant, so it is said before what was found.
    Baselines of a group have the same conversations by seed, which count once."""
    told = {}
    for group in groups:
        each = {trial.seed: _plan(trial) for trials in group.trials.values() for trial in trials}
        if said := cut_by_context(each.values()):
            told[group.name] = said
    if not told:
        return []
    alike = len(told) == len({group.name for group in groups}) and len(set(told.values())) == 1
    if alike:
        where = next(iter(told.values()))
    else:
        where = _listed([f"{f'({name}) ' if name else ''}{said}" for name, said in told.items()], between="; ")
    return [context_cuts(where)]


def _plan(trial: Trial) -> Mapping[str, Any]:
    """What the workload said of itself."""
    plan = (trial.engine or {}).get("workload")
    return plan if isinstance(plan, Mapping) else {}


def offered_rate(trials: Sequence[Trial]) -> float | None:
    """Requests a second that the trials were offered in steady state (their mean); None where replies alone decide the rate,
    or the record of one does not say."""
    rates = [_plan(trial).get("request_rate_per_s") for trial in trials]
    known = [float(rate) for rate in rates if rate is not None]
    return fmean(known) if known and len(known) == len(rates) else None


def without(sweep: Sweep, jobs: Sequence[JobResult]) -> list[str]:
    """How many trials of a sweep have nothing to show: everything said is of the others."""
    missing = sum(job.trial is None for job in jobs) + max(0, sweep.n_expected - len(jobs))
    expected = max(sweep.n_expected, len(jobs))
    if not missing:
        return []
    if sweep.status == "running":
        ended = sum(job.trial is None and job.last.status != "running" for job in jobs)
        said = [
            *([f"{missing - ended} of its {expected} trials have not ended yet"] if missing > ended else []),
            *([f"{ended} did not complete"] if ended else []),
        ]
        return [f"The sweep is running: {' and '.join(said)}; all that is said is of the others."]
    if missing == expected:
        return [f"None of the sweep's {expected} trials completed; the same command runs them again."]
    return [
        f"{missing} of the sweep's {expected} trials did not complete, and all that is said is of the others; the same "
        "command runs what is missing."
    ]


def mixed(trials: Sequence[Trial]) -> list[str]:
    """What these trials mix, so that their times must not be compared."""
    return [f"The sweep holds {one.what}: do not compare their times, and {one.remedy}." for one in mixtures(trials)]


def _mixed_groups(groups: Sequence[TrialGroup]) -> list[str]:
    """Within a setting, whose trials stand beside each other: that an axis sweeps hardware or weights is no mixture."""
    beside = [[trial for own in group.trials.values() for trial in own] for group in groups]
    return list(dict.fromkeys(sentence for trials in beside for sentence in mixed(trials)))


def _turns_without_reply(found: Evidence, groups: Sequence[TrialGroup]) -> list[str]:
    """Turns that timed out, failed or were refused are in no latency: who loses the slowest ones looks fast."""
    lost = []
    for group in groups:
        for name, trials in group.trials.items():
            less = found.incomplete(trials)
            if less:
                turns = less.total() + sum(int(found.metric(trial, "turns", "completed") or 0) for trial in trials)
                each = ", ".join(f"{count:,} {status}" for status, count in less.items())
                lost.append(f"{_place(group, name)} {less.total():,} of {turns:,} ({each})")
    if not lost:
        return []
    return [
        f"Turns that did not complete are in no latency, no ratio and no share of history, and end some conversations: "
        f"{_listed(lost, between='; ')}. What is left may be the easier part."
    ]


def _slower_at(found: Evidence, groups: Sequence[TrialGroup]) -> list[str]:
    """At what Pensieve is clearly behind another baseline with every seed: the sentence above is of the first token alone."""
    slower, fewest = [], FEWEST_GROUPS
    for group in groups:
        for other in (name for name in group.trials if OURS in group.trials and name != OURS):
            ours, theirs = group.trials[OURS], group.trials[other]
            token_ms = _behind(found.by_seed(theirs, "tpot_ms_mean"), found.by_seed(ours, "tpot_ms_mean"))
            if token_ms is not None:
                theirs_ms, ours_ms, seeds = token_ms
                slower.append(
                    f"{ours_ms:.3g} ms a further token where {_place(group, other)} takes {theirs_ms:.3g}{_if_few(seeds)}"
                )
                fewest = min(fewest, seeds)
            if any(_load_decides(trial) for trial in (*ours, *theirs)):
                continue  # how many tokens there are to make; who finishes less of it is told
            made = _behind(*(found.by_seed(own, "throughput_output_tok_s") for own in (ours, theirs)))
            if made is not None:
                few = _if_few(made[2])
                slower.append(f"{made[0]:.3g} output tokens/s where {_place(group, other)} makes {made[1]:.3g}{few}")
                fewest = min(fewest, made[2])
    if not slower:
        return []
    sure = ", and the same with every seed" if fewest >= FEWEST_GROUPS else ""
    return [f"Pensieve is behind at: {_listed(slower, between='; ')} (means of trials{sure})."]


def _if_few(seeds: int) -> str:
    return f" ({seeds} seed{'s' * (seeds > 1)}: no interval)" if seeds < FEWEST_GROUPS else ""


def _behind(less: Mapping[int, float], more: Mapping[int, float]) -> tuple[float, float, int] | None:
    """The two means over the seeds that both have, and how many these are, where the first is clearly less with each."""
    seeds = less.keys() & more.keys()
    if not seeds or not all(_clearly_less(less[seed], more[seed]) for seed in seeds):
        return None
    return fmean(less[seed] for seed in seeds), fmean(more[seed] for seed in seeds), len(seeds)


def _waiting(found: Evidence, groups: Sequence[TrialGroup]) -> list[str]:
    """Baselines whose first token at the last turn is mostly waiting for others: at or past saturation."""
    late = []
    for group in groups:
        for name, trials in group.trials.items():
            last = _last_turns(found, trials)
            if _mostly_wait(last):
                late.append(
                    f"{_place(group, name)} {last['queue_ms'].median():,.0f} of {last['ttft_ms'].median():,.0f} ms"
                )
    if not late:
        return []
    return [
        "Near saturation, where most of the time to the last turn's first token is waiting in the queue (medians): "
        f"{_listed(late)}. Ratios to these hold for this load, and grow with it."
    ]


def _last_turns(found: Evidence, trials: Sequence[Trial]) -> pd.DataFrame:
    """`queue_ms` and `ttft_ms` of each conversation's last turn."""
    import pandas as pd

    turns = found.turns(trials)
    both = pd.concat([values_of(turns, "queue_ms"), values_of(turns, "ttft_ms")], axis=1, join="inner")
    last = both.sort_index().groupby(level=CONVERSATION).tail(1)
    return last[last["ttft_ms"] > 0]


def _mostly_wait(last: pd.DataFrame) -> bool:
    return not last.empty and bool((last["queue_ms"] / last["ttft_ms"]).median() > MOSTLY)


def _less_finished(found: Evidence, groups: Sequence[TrialGroup]) -> list[str]:
    """Baselines that finished less of an open load than another did with the same seeds, or less than was offered while most
    of the time was waiting.

    Without waiting, less than the nominal rate is what chance made of arrivals and of turns a conversation: it is not told.
    """
    less = []
    for group in groups:
        rates = {name: own for name, trials in group.trials.items() if (own := _steady_rates(found, trials))}
        for name, own in rates.items():
            trials = group.trials[name]
            rate, offered = fmean(own.values()), None if starting(trials) else offered_rate(trials)
            if offered is not None and _clearly_less(rate, offered) and _mostly_wait(_last_turns(found, trials)):
                less.append(
                    f"{_place(group, name)} {rate:.3g} of {offered:.3g} offered, and most of the time to the last turn's "
                    "first token was waiting"
                )
            elif ahead := _most_ahead(own, {other: of for other, of in rates.items() if other != name}):
                other, rate, most = ahead
                less.append(f"{_place(group, name)} {rate:.3g} where {other} finished {most:.3g} with the same seeds")
    if not less:
        return []
    return [
        f"Less of the load was finished, in requests/s: {_listed(less, between='; ')}. Latencies are not at equal rates."
    ]


def _most_ahead(own: Mapping[int, float], others: Mapping[str, Mapping[int, float]]) -> tuple[str, float, float] | None:
    """Of those that finished clearly more with the seeds that both ran, the one that finished most: its name, and the two
    mean rates over these seeds."""
    ahead = []
    for other, rates in others.items():
        if seeds := own.keys() & rates.keys():
            rate, more = fmean(own[seed] for seed in seeds), fmean(rates[seed] for seed in seeds)
            if _clearly_less(rate, more):
                ahead.append((other, rate, more))
    return max(ahead, key=lambda one: one[2], default=None)


def _clearly_less(rate: float, other: float) -> bool:
    return rate < (1 - UNEQUAL_RATE) * other


def _steady_rates(found: Evidence, trials: Sequence[Trial]) -> dict[int, float]:
    """By seed the mean throughput in requests/s over the window, under a load that does not wait for replies to begin
    conversations; empty under another."""
    if any(not _load_decides(trial) or "window" in trial.flags for trial in trials):
        return {}
    return found.by_seed(trials, "throughput_req_s")


def _load_decides(trial: Trial) -> bool:
    """How much there is to do, and not the replies, for which a closed load waits."""
    return bool(trial.flags.get("load", "closed") != "closed")


def starting(trials: Sequence[Trial]) -> bool:
    """Whether an open load was still filling up when the window began: the offered rate is that of steady state."""
    return any("not_steady" in trial.flags for trial in trials)


def _caches(groups: Sequence[TrialGroup]) -> list[str]:
    """Servers that ran before a trial, whose cache was not what it declares, or of which nobody can tell."""
    held, untold = (_flagged(groups, flag) for flag in ("contaminated", "cache_state_unverified"))
    return [
        *([f"The cache was not what was declared: {held}"] if held else []),
        *([f"Whether the cache was what was declared is not known: {untold}"] if untold else []),
    ]


def _flagged(groups: Sequence[TrialGroup], flag: str) -> str:
    """Where trials have the flag, with what it says of the first of them; empty where none has."""
    places = []
    for group in groups:
        for name, trials in group.trials.items():
            said = [str(trial.flags[flag]).rstrip(".") for trial in trials if flag in trial.flags]
            if said:
                more = f" (and {len(said) - 1} more trials)" if len(said) > 1 else ""
                places.append(f"{_place(group, name)}: {said[0]}{more}")
    return _listed(places, between="; ")


def _slots(found: Evidence, groups: Sequence[TrialGroup]) -> list[str]:
    """Baselines with a fixed number of slots that turns often found all taken."""
    limited = []
    for group in groups:
        for name, trials in group.trials.items():
            shares = [share for trial in trials if (share := _found_full(trial, found.turns([trial]))) is not None]
            if shares and median(shares) > _FOUND_FULL:
                slots = "/".join(sorted({str(_slots_of(trial)) for trial in trials}))
                limited.append(
                    f"{_place(group, name)} has {slots}, which {median(shares):.0%} of its turns found taken"
                )
    if not limited:
        return []
    return [
        f"The number of slots limits how many requests run at once: {_listed(limited)}. baseline.cache.n_slots sets it (of "
        "llama.cpp: baseline.engine.n_parallel), at the cost of a smaller slot each."
    ]


def _slots_of(trial: Trial) -> int | None:
    settings = trial.engine or {}
    count = settings.get("n_slots", settings.get("n_parallel"))
    return None if count is None else int(count)


def _found_full(trial: Trial, turns: pd.DataFrame) -> float | None:
    """The share of the turns that came while as many others as there are slots were not finished; None without slots."""
    slots = _slots_of(trial)
    known = turns[["arrived_s", "finished_s"]].dropna() if slots is not None else turns.iloc[:0]
    if slots is None or known.empty:
        return None
    arrived, finished = known["arrived_s"].sort_values().to_numpy(), known["finished_s"].sort_values().to_numpy()
    before = range(len(arrived))  # of those that come at once, each finds the ones before it
    running = before - finished.searchsorted(arrived, side="right")
    return float((running >= slots).mean())


def _few(found: Evidence, groups: Sequence[TrialGroup]) -> list[str]:
    seeds = {trial.seed for trial in found.trials}
    if not seeds:
        return []
    notes = []
    if len(seeds) == 1:
        notes.append(
            "One seed: intervals, where there are any, are over its conversations, which met one machine at one time."
        )
        if (times := len({trial.repeat for trial in found.trials})) > 1:
            notes.append(
                f"The seed ran {times} times, and each counts as conversations of its own: intervals are those of this "
                "machine, and narrower than other conversations would make them. Add seeds."
            )
    elif len(seeds) < FEWEST_GROUPS:
        notes.append(f"{len(seeds)} seeds: no intervals below {FEWEST_GROUPS}; add seed=0,1,2,3,4.")
    counts = [
        len(conversations_of(values_of(found.turns(trials), "ttft_ms")).unique())
        for group in groups
        for trials in group.trials.values()
    ]
    if counts and 0 < min(counts) < enough_for(0.5):
        notes.append(
            f"Few conversations: medians are over {min(counts)} of them, seeds together; below {enough_for(0.5)} another few "
            "would move them. Add conversations, or seeds."
        )
    return notes


def _tiers_unused(found: Evidence) -> list[str]:
    """Pensieve that never evicted, or never read back what it evicted, says nothing about its tiers."""
    ours = [trial for trial in found.trials if trial.baseline == OURS]
    read = [found.metric(trial, "cpu_hit_rate") for trial in ours]
    if not ours or any(rate is None or rate > 0 for rate in read):
        return []
    evicted = [found.metric(trial, "evicted_chunks") for trial in ours]
    moved = sum(count for count in evicted if count)
    if None in evicted or moved == 0:
        return []
    return [
        f"{moved:,.0f} chunks left the GPU tier and none was read back from CPU: nothing here shows what the CPU tier is "
        "worth. More conversations that return, or a larger cache.cpu, would."
    ]


def _busy(found: Evidence) -> list[str]:
    shares = [float(trial.flags["others_cpu_share"]) for trial in found.trials if "others_cpu_share" in trial.flags]
    if not shares or max(shares) <= _BUSY:
        return []
    return [
        f"Other programs used {median(shares):.0%} of this machine's CPU time meanwhile (median of trials, at most "
        f"{max(shares):.0%}): milliseconds are longer by it, and ratios less certain."
    ]


def _model_off(found: Evidence) -> list[str]:
    worst: dict[str, float] = {}
    for trial in found.trials:
        error = found.metric(trial, "cost_model_error_pct")
        if error is not None and abs(error) > max(_MODEL_OFF_PCT, abs(worst.get(trial.baseline, 0.0))):
            worst[trial.baseline] = error
    if not worst:
        return []
    each = ", ".join(f"{name} {error:+.0f} %" for name, error in worst.items())
    return [f"The cost model that eviction goes by was far from what was measured, at most by: {each}."]


def _place(group: TrialGroup, baseline: str) -> str:
    return f"{baseline} ({group.name})" if group.name else baseline


def _listed(places: Sequence[str], between: str = ", ") -> str:
    more = len(places) - _SHOWN
    return between.join(places[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
