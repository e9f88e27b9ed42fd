"""What a reader should know of a sweep's numbers: one note for each thing that applies, by its code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from sqlalchemy import func, select

from pensieve.core.request import is_measured
from pensieve.lab.results.compare_trials import UNEQUAL_RATE
from pensieve.lab.results.findings import OURS, REFERENCE, mostly_lost
from pensieve.lab.results.frame import CONVERSATION, Frame, TrialGroup, conversations_of, values_of
from pensieve.lab.results.note_texts import ABOVE, TEXTS
from pensieve.lab.results.schema import Trial, turn_table
from pensieve.lab.results.trials import field_of, footer, mixtures
from pensieve.lab.statistics import FEWEST_GROUPS, enough_for
from pensieve.lab.window import HALVES_MAY_DIFFER
from pensieve.lab.workload.base import byte_notes, cut_by_context
from pensieve.units import percent

if TYPE_CHECKING:
    import pandas as pd

NOTE_COLUMNS = ("ttft_ms", "queue_ms", "arrived_s", "finished_s")
"""The turns' columns that `notes` reads."""
MOSTLY = 0.5
"""Of the time to first token: who waits longer than that in the queue asks a machine at or past saturation."""
_BUSY = 0.1  # of the CPUs' time, spent by others
_MODEL_OFF_PCT = 50.0
_FOUND_FULL = 0.1  # of the turns, from which on slots are said to limit a baseline
_SHOWN = 4  # places that a note names
_WINDOW_FLAGS = ("window", "not_steady", "late_warmup", "none_in_window", "few_turns", "halves")


@dataclass(frozen=True, slots=True)
class Note:
    """code: a key of note_texts.TEXTS. values: what its text names."""

    code: str
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return TEXTS[self.code].format(**self.values)

    @property
    def above(self) -> bool:
        """It stands above the table."""
        return self.code in ABOVE


def _where(code: str, places: Sequence[str], between: str = ", ", **values: Any) -> list[Note]:
    """A note that names these places; none without any."""
    more = len(places) - _SHOWN
    listed = between.join(places[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
    return [Note(code, {"where": listed, **values})] if places else []


def notes(found: Frame, groups: Sequence[TrialGroup]) -> list[Note]:
    """All that apply to the sweep, those above the table first."""
    made = [*missing(found), *not_comparable(groups), *_lost_most(found, groups), *load_changed(groups)]
    for rule in _RULES:
        made += rule(found, groups)
    return made


def missing(found: Frame) -> list[Note]:
    """How many trials of the sweep have nothing to show: everything said is of the others."""
    sweep, jobs = found.sweep, found.jobs
    lost = sum(job.trial is None and job.last.status != "running" for job in jobs)
    expected = max(sweep.n_expected, len(jobs))
    count = expected - len(found.trials)
    if not count:
        return []
    if sweep.status == "running":
        return [Note("sweep_running", {"waiting": count - lost, "lost": lost, "expected": expected})]
    if count == expected:
        return [Note("none_completed", {"expected": expected})]
    return [Note("trials_missing", {"missing": count, "expected": expected})]


def not_comparable(groups: Sequence[TrialGroup]) -> list[Note]:
    """What the trials of a setting mix. That an axis sweeps hardware or weights is no mixture."""
    beside = [[trial for own in group.trials.values() for trial in own] for group in groups]
    reasons = dict.fromkeys((one.what, one.remedy) for trials in beside for one in mixtures(trials))
    return [Note("do_not_compare", {"what": what, "remedy": remedy}) for what, remedy in reasons]


def load_changed(groups: Sequence[TrialGroup]) -> list[Note]:
    """What makes the load another one than was meant: lengths in bytes, conversations that the model's context cuts."""
    plans = [plan_of(trial) for group in groups for trials in group.trials.values() for trial in trials]
    in_bytes = dict.fromkeys(text for plan in plans for text in byte_notes(plan))
    return [*(Note("tokens_are_bytes", {"text": text}) for text in in_bytes), *_context_cut(groups)]


def _context_cut(groups: Sequence[TrialGroup]) -> list[Note]:
    """What the model's context took from the conversations. Baselines of a group have the same conversations by seed, which
    count once."""
    told = {}
    for group in groups:
        each = {trial.seed: plan_of(trial) for trials in group.trials.values() for trial in trials}
        if said := cut_by_context(each.values()):
            told[group.name] = said
    if not told:
        return []
    alike = len(told) == len({group.name for group in groups}) and len(set(told.values())) == 1
    if alike:
        return [Note("context_cut", {"where": next(iter(told.values()))})]
    each_place = [f"{f'({name}) ' if name else ''}{said}" for name, said in told.items()]
    return _where("context_cut", each_place, "; ")


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


def _lost_most(found: Frame, groups: Sequence[TrialGroup]) -> list[Note]:
    where = [
        f"{_place(group, name)} {done:,} of {asked:,}"
        for group in groups
        for name, (done, asked) in mostly_lost(found, group).items()
    ]
    return _where("mostly_lost", where)


# -- one rule for each note ---------------------------------------------------------------------------------------------


def _turns_without_reply(found: Frame, groups: Sequence[TrialGroup]) -> list[Note]:
    lost = []
    for group, name, trials in _all(groups):
        less = found.incomplete(trials)
        if less:
            turns = less.total() + sum(int(found.metric(trial, "turns", "completed") or 0) for trial in trials)
            each = ", ".join(f"{count:,} {status}" for status, count in less.items())
            lost.append(f"{_place(group, name)} {less.total():,} of {turns:,} ({each})")
    return _where("turns_without_reply", lost, "; ")


def _waiting(found: Frame, groups: Sequence[TrialGroup]) -> list[Note]:
    late = []
    for group, name, trials in _all(groups):
        last = _last_turns(found, trials)
        if _mostly_wait(last):
            waited, ttft = last["queue_ms"].median(), last["ttft_ms"].median()
            late.append(f"{_place(group, name)} {waited:,.0f} of {ttft:,.0f} ms")
    return _where("near_saturation", late)


def _last_turns(found: Frame, trials: Sequence[Trial]) -> pd.DataFrame:
    """`queue_ms` and `ttft_ms` of each conversation's last turn."""
    import pandas as pd

    turns = found.turns(trials)
    both = pd.concat([values_of(turns, "queue_ms"), values_of(turns, "ttft_ms")], axis=1, join="inner")
    last = both.sort_index().groupby(level=CONVERSATION).tail(1)
    return last[last["ttft_ms"] > 0]


def _mostly_wait(last: pd.DataFrame) -> bool:
    return not last.empty and bool((last["queue_ms"] / last["ttft_ms"]).median() > MOSTLY)


def _less_finished(found: Frame, groups: Sequence[TrialGroup]) -> list[Note]:
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
            elif ahead := _most_ahead(own, {other: of for other, of in rates.items() if other != name}):
                other, rate, most = ahead
                less.append(f"{_place(group, name)} {rate:.3g}, {other} {most:.3g} with the same seeds")
    return _where("less_finished", less, "; ")


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


def _steady_rates(found: Frame, trials: Sequence[Trial]) -> dict[int, float]:
    """By seed the mean throughput in requests/s over the window, under a load that does not wait for replies to begin
    conversations; empty under another."""
    if any(not _load_decides(trial) or "window" in trial.flags for trial in trials):
        return {}
    return found.by_seed(trials, "throughput_req_s")


def _load_decides(trial: Trial) -> bool:
    """How much there is to do, and not the replies, for which a closed load waits."""
    return bool(trial.flags.get("load", "closed") != "closed")


def _slower_at(found: Frame, groups: Sequence[TrialGroup]) -> list[Note]:
    """At what Pensieve is behind another baseline with every seed: the headline is of the first token alone."""
    slower = []
    for group in groups:
        for other in (name for name in group.trials if OURS in group.trials and name != OURS):
            ours, theirs = group.trials[OURS], group.trials[other]
            token_ms = _behind(found.by_seed(theirs, "tpot_ms_mean"), found.by_seed(ours, "tpot_ms_mean"))
            if token_ms is not None:
                slower.append(
                    f"TPOT {token_ms[1]:.3g} ms, {_place(group, other)} {token_ms[0]:.3g}{_seeds(token_ms[2])}"
                )
            if any(_load_decides(trial) for trial in (*ours, *theirs)):
                continue  # how many tokens there are to make; who finishes less of it is told
            made = _behind(*(found.by_seed(own, "throughput_output_tok_s") for own in (ours, theirs)))
            if made is not None:
                slower.append(f"{made[0]:.3g} output tokens/s, {_place(group, other)} {made[1]:.3g}{_seeds(made[2])}")
    return _where("slower_at", slower, "; ")


def _seeds(count: int) -> str:
    return f" ({count} seed{'s' * (count > 1)})" if count < FEWEST_GROUPS else ""


def _behind(less: Mapping[int, float], more: Mapping[int, float]) -> tuple[float, float, int] | None:
    """The two means over the seeds that both have, and how many these are, where the first is clearly less with each."""
    seeds = less.keys() & more.keys()
    if not seeds or not all(_clearly_less(less[seed], more[seed]) for seed in seeds):
        return None
    return fmean(less[seed] for seed in seeds), fmean(more[seed] for seed in seeds), len(seeds)


def _caches(_found: Frame, groups: Sequence[TrialGroup]) -> list[Note]:
    """Servers that ran before a trial, whose cache was not what it declares, or of which nobody can tell."""
    made = []
    for code, flag in (("cache_not_as_declared", "contaminated"), ("cache_not_verified", "cache_state_unverified")):
        places = []
        for group, name, trials in _all(groups):
            said = [str(trial.flags[flag]).rstrip(".") for trial in trials if flag in trial.flags]
            if said:
                more = f" (and {len(said) - 1} more trials)" if len(said) > 1 else ""
                places.append(f"{_place(group, name)}: {said[0]}{more}")
        made += _where(code, places, "; ")
    return made


def _slots(found: Frame, groups: Sequence[TrialGroup]) -> list[Note]:
    """Baselines with a fixed number of slots that turns often found all taken."""
    limited = []
    for group, name, trials in _all(groups):
        shares = [share for trial in trials if (share := _found_full(trial, found.turns([trial]))) is not None]
        if shares and median(shares) > _FOUND_FULL:
            slots = "/".join(sorted({str(_slots_of(trial)) for trial in trials}))
            limited.append(f"{_place(group, name)} has {slots}, taken for {median(shares):.0%} of its turns")
    return _where("slots_taken", limited)


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


def _few(found: Frame, groups: Sequence[TrialGroup]) -> list[Note]:
    seeds = {trial.seed for trial in found.trials}
    if not seeds:
        return []
    made = []
    if len(seeds) == 1:
        made.append(Note("one_seed"))
        if (times := len({trial.repeat for trial in found.trials})) > 1:
            made.append(Note("repeated_seed", {"times": times}))
    elif len(seeds) < FEWEST_GROUPS:
        made.append(Note("few_seeds", {"seeds": len(seeds), "least": FEWEST_GROUPS}))
    counts = [
        len(conversations_of(values_of(found.turns(trials), "ttft_ms")).unique()) for _, _, trials in _all(groups)
    ]
    if counts and 0 < min(counts) < (least := enough_for(0.5)):
        made.append(Note("few_conversations", {"count": min(counts), "least": least}))
    turns = [len(values_of(found.turns([trial]), "ttft_ms")) for trial in found.trials]
    if turns and 0 < min(turns) < (least := enough_for(0.99)):
        made.append(Note("few_turns_for_p99", {"count": min(turns), "least": f"{least:,}"}))
    return made


def _tiers(found: Frame, _groups: Sequence[TrialGroup]) -> list[Note]:
    """Pensieve that never evicted, or never read back what it evicted, says nothing about its tiers."""
    ours = [trial for trial in found.trials if trial.baseline == OURS]
    evicted = [found.metric(trial, "evicted_chunks") for trial in ours]
    if not ours or None in evicted:
        return []
    moved = sum(count for count in evicted if count)
    dropped = [found.metric(trial, "dropped_chunks") for trial in ours]
    if not moved:
        return [] if any(count is None or count > 0 for count in dropped) else [_nothing_evicted(ours[0])]
    read = [found.metric(trial, "cpu_hit_rate") for trial in ours]
    if any(rate is None or rate > 0 for rate in read):
        return []
    return [Note("cpu_tier_unused", {"chunks": f"{moved:,.0f}"})]


def _nothing_evicted(trial: Trial) -> Note:
    pressure, gpu = (field_of(trial, name) for name in ("workload.pressure", "cache.gpu"))
    raised = f"raise workload.pressure (now {pressure})" if pressure is not None else "add conversations"
    lowered = f"lower cache.gpu (now {gpu})" if gpu is not None else "lower cache.gpu"
    return Note("nothing_evicted", {"raised": raised, "lowered": lowered})


def _machine(found: Frame, _groups: Sequence[TrialGroup]) -> list[Note]:
    made = []
    shares = [float(trial.flags["others_cpu_share"]) for trial in found.trials if "others_cpu_share" in trial.flags]
    if shares and max(shares) > _BUSY:
        made.append(Note("busy_machine", {"share": median(shares), "most": max(shares)}))
    worst: dict[str, float] = {}
    for trial in found.trials:
        error = found.metric(trial, "cost_model_error_pct")
        if error is not None and abs(error) > max(_MODEL_OFF_PCT, abs(worst.get(trial.baseline, 0.0))):
            worst[trial.baseline] = error
    return made + _where("cost_model_off", [f"{name} {error:+.0f} %" for name, error in worst.items()])


def _what_ran(found: Frame, _groups: Sequence[TrialGroup]) -> list[Note]:
    trials = found.trials
    made = _where("simulated", sorted({trial.hardware for trial in trials if trial.simulated}))
    if any(trial.weights == "random" for trial in trials):
        made.append(Note("random_weights"))
    made += [Note("served_by", {"text": text}) for text in footer(trials)]
    if load := load_line(trials):
        made.append(Note("load", {"text": load}))
    if budgets := _budgets(trials):
        made.append(Note("budgets", {"where": budgets}))
    if preparing := _preparing_turns(found):
        made.append(Note("warm_up", {"count": f"{preparing:,}"}))
    return made


def _window(found: Frame, _groups: Sequence[TrialGroup]) -> list[Note]:
    """What qualifies the throughput column: a note for each flag, with the trials that have it by baseline."""
    trials, made = found.trials, []
    totals = Counter(trial.baseline for trial in trials)
    for flag in _WINDOW_FLAGS:
        flagged = Counter(trial.baseline for trial in trials if flag in trial.flags)
        if flagged:
            each = ", ".join(f"{name} {count} of {totals[name]}" for name, count in flagged.items())
            made.append(Note(flag, {"where": "all trials" if flagged == totals else each, "limit": HALVES_MAY_DIFFER}))
    drained: dict[str, float] = {}
    for trial in trials:
        if (share := float(trial.flags.get("drain_share") or 0.0)) > 0:
            drained[trial.baseline] = max(share, drained.get(trial.baseline, 0.0))
    return made + _where("drain", [f"{name} {share:.0%}" for name, share in drained.items()])


def _bound(found: Frame, groups: Sequence[TrialGroup]) -> list[Note]:
    """Of one setting; of several it is a column. A server that stores nothing has no bound."""
    if len(groups) != 1:
        return []
    bounds = {name: found.mean(trials, "bound_hit_rate") for name, trials in groups[0].trials.items()}
    known = [f"{name} {percent(bound)}" for name, bound in bounds.items() if bound is not None and name != REFERENCE]
    return _where("bound", known)


def _failures(found: Frame, _groups: Sequence[TrialGroup]) -> list[Note]:
    lost = [job.last for job in found.jobs if job.last.status not in ("completed", "running")]
    each = [f"{t.baseline}, seed {t.seed}, {t.status}{f': {t.error}'.rstrip('.') if t.error else ''}" for t in lost]
    made = _where("not_completed", each, "; ")
    waiting = found.sweep.n_expected - len(found.jobs)
    if waiting > 0:
        made.append(Note("never_begun", {"count": waiting, "expected": found.sweep.n_expected}))
    return made


_RULES: Sequence[Callable[[Frame, Sequence[TrialGroup]], list[Note]]] = (
    _turns_without_reply, _waiting, _less_finished, _slower_at, _caches, _slots, _few, _tiers, _machine, _what_ran,
    _window, _bound, _failures,
)  # fmt: skip


# -- what they are made of ----------------------------------------------------------------------------------------------


def load_line(trials: Sequence[Trial]) -> str | None:
    """What was asked: the load's kind and rate, and the lengths of conversations, messages and replies."""
    known = [plan for trial in trials if (plan := plan_of(trial))]
    parts = []
    for name, unit in (("sessions", "conversations"), ("message_tokens_mean", "tokens a message")):
        if values := [float(plan[name]) for plan in known if name in plan]:
            parts.append(f"{_range(values)} {unit}")
    if replies := [float(plan["reply_tokens_mean"]) for plan in known if "reply_tokens_mean" in plan]:
        kinds = {str(plan["replies"]) for plan in known if "replies" in plan}
        parts.append(f"{_range(replies)} a reply" + (f" ({', '.join(sorted(kinds))})" if kinds else ""))
    for name, words in (
        ("think_time_s", "s of think time"),
        ("think_time_cap_s", "s of it at most"),
        ("request_interval_s", "s between arrivals"),
    ):
        if values := [float(plan[name]) for plan in known if isinstance(plan.get(name), int | float)]:
            parts.append(f"{_range(values)} {words}")
    load = ", ".join(sorted({str(plan["load"]) for plan in known if "load" in plan}))
    load += ", tokens are bytes" if load and any(byte_notes(plan) for plan in known) else ""
    return f"Load ({load}): {', '.join(parts)}." if load else None


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:,.4g}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:,.4g} to {high:,.4g}"


def _budgets(trials: Sequence[Trial]) -> str:
    """The KV budget of each baseline and the working set of the workload, in tokens."""
    parts: dict[str, None] = {}
    for trial in trials:
        if trial.gpu_tokens is not None:
            cpu = f" + CPU {trial.cpu_tokens:,}" if trial.cpu_tokens else ""
            on_disk = int((trial.engine or {}).get("disk_tokens") or 0)
            disk = f" + disk {on_disk:,}" if on_disk else ""
            parts[f"{trial.baseline} GPU {trial.gpu_tokens:,}{cpu}{disk}"] = None
    if not parts:
        return ""
    sets = [trial.working_set_tokens for trial in trials if trial.working_set_tokens is not None]
    working = f"; working set {_range(sets)}" if sets else ""
    return f"{', '.join(parts)}{working}"


def _preparing_turns(found: Frame) -> int:
    """The number of turns that are not measured: they prepare others."""
    query = select(turn_table.c.phase, func.count()).where(
        turn_table.c.trial_id.in_({trial.id for trial in found.trials})
    )
    with found.store.database.reading() as connection:
        phases = connection.execute(query.group_by(turn_table.c.phase)).all()
    return sum(count for phase, count in phases if not is_measured(phase))


def _all(groups: Sequence[TrialGroup]) -> list[tuple[TrialGroup, str, Sequence[Trial]]]:
    return [(group, name, trials) for group in groups for name, trials in group.trials.items()]


def _place(group: TrialGroup, baseline: str) -> str:
    return f"{baseline} ({group.name})" if group.name else baseline
