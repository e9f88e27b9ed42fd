"""What a sweep found, in a sentence a stranger understands, and what would make that sentence mislead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING

from pensieve.results.evidence import Evidence, TrialGroup
from pensieve.results.frame import CONVERSATION, conversation_ends, paired, speed_up, values_of
from pensieve.results.schema import Trial
from pensieve.statistics import FEWEST_GROUPS, PairedRatio

if TYPE_CHECKING:
    import pandas as pd

OURS = "pensieve"
REFERENCE = "stateless"
_GROUPS_SHOWN = 4  # sentences that anybody reads; with more groups the table is the answer
_BUSY = 0.1  # of the CPUs' time, spent by others
_MODEL_OFF_PCT = 50.0
_NAMES = {"stateless": "stateless serving's"}


def last_turn_ratio(a: pd.Series[float], b: pd.Series[float]) -> PairedRatio | None:
    """How many times a is of b, by frame.KEY, at the last turn of each conversation that both measured; see speed_up."""
    return speed_up(conversation_ends(paired(a, b), last=True))


def advantages(ttft: Mapping[str, pd.Series[float]]) -> dict[str, PairedRatio]:
    """By other baseline, how many times as soon Pensieve's first token comes at the last turn; empty without Pensieve.

    ttft: in ms, by baseline.
    """
    if OURS not in ttft:
        return {}
    order = sorted(ttft, key=lambda name: name != REFERENCE)
    return {name: ratio for name in order if name != OURS and (ratio := last_turn_ratio(ttft[name], ttft[OURS]))}


def headlines(found: Evidence, ratios: Sequence[Mapping[str, PairedRatio]]) -> list[str]:
    """One sentence a group where Pensieve ran beside others, one for the sweep where only policies or sizes differ.

    ratios: of each of found.groups(), its advantages. Empty where there is nothing to compare.
    """
    groups = found.groups()
    beside = [(group, own) for group, own in zip(groups, ratios, strict=True) if own]
    if beside and len(beside) <= _GROUPS_SHOWN:
        return [_of_group(found, group, own) for group, own in beside]
    alone = {name for group in groups for name in group.trials}
    return _of_alternatives(found, groups) if len(groups) > 1 and len(alone) == 1 else []


def _of_group(found: Evidence, group: TrialGroup, ratios: Mapping[str, PairedRatio]) -> str:
    ahead = {name: ratio for name, ratio in ratios.items() if _side(ratio) > 0}
    behind = {name: ratio for name, ratio in ratios.items() if _side(ratio) < 0}
    even = {name: ratio for name, ratio in ratios.items() if _side(ratio) == 0}
    parts = []
    if ahead:
        parts.append(f"comes {_listed(ahead)}")
    if behind:
        parts.append(f"comes later than {_listed(behind, faster=False)}")
    if even:
        parts.append(f"is not told apart from {_listed(even, faster=False)}")
    at = f"{group.name}: " if group.name else ""
    simulated = "on simulated hardware " if all(trial.simulated for trial in group.trials[OURS]) else ""
    counted = next(iter(ratios.values())).groups
    few = f" ({counted} {'seeds' if ratios[next(iter(ratios))].n_seeds > 1 else 'conversations'}: no interval)"
    doubt = few if all(ratio.ci_low is None for ratio in ratios.values()) else ""
    sentence = f"{at}At a conversation's last turn Pensieve's first token {simulated}{', and '.join(parts)}{doubt}"
    return f"{sentence}{_sources(found, group)}."


def _side(ratio: PairedRatio) -> int:
    """1: above 1 with its interval; -1: below; 0: not told apart. Without an interval the ratio alone decides."""
    low, high = (ratio.ratio if end is None else end for end in (ratio.ci_low, ratio.ci_high))
    return 1 if low > 1 else -1 if high < 1 else 0


def _listed(ratios: Mapping[str, PairedRatio], faster: bool = True) -> str:
    """ "6.6× [3.1, 17] as soon as stateless serving's and ...", or "gpu_only's (1.04× [0.95, 1.13])"."""
    names = {name: _NAMES.get(name, f"{name}'s") for name in ratios}
    if faster:
        parts = [f"{times(ratio)} as soon as {names[name]}" for name, ratio in ratios.items()]
    else:
        parts = [f"{names[name]} ({times(ratio)})" for name, ratio in ratios.items()]
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def times(ratio: PairedRatio) -> str:
    """ "6.6× [3.1, 17.3]"; without an interval the ratio alone."""
    digits = 1 if (ratio.ci_high or ratio.ratio) >= 10 else 2
    interval = ""
    if ratio.ci_low is not None and ratio.ci_high is not None:
        interval = f" [{ratio.ci_low:.{digits}f}, {ratio.ci_high:.{digits}f}]"
    return f"{ratio.ratio:.{digits}f}×{interval}"


def _sources(found: Evidence, group: TrialGroup) -> str:
    """Where Pensieve's history came from."""
    names = ("gpu_hit_rate", "cpu_hit_rate", "disk_hit_rate", "miss_rate")
    gpu, cpu, disk, missed = (_mean(found, group.trials[OURS], name) for name in names)
    if gpu is None or cpu is None or missed is None:
        return ""
    read = f"{disk:.0%} from disk, " if disk else ""
    return f"; of its history {gpu:.0%} was found on GPU, {cpu:.0%} came from CPU, {read}{missed:.0%} was recomputed"


def _of_alternatives(found: Evidence, groups: Sequence[TrialGroup]) -> list[str]:
    """Several settings of one baseline: which had to recompute least, and which most."""
    missed = {}
    for group in groups:
        [trials] = group.trials.values()
        rate = _mean(found, trials, "miss_rate")
        if rate is not None:
            missed[group.name] = rate
    if len(missed) < 2:
        return []
    best, worst = min(missed, key=lambda name: missed[name]), max(missed, key=lambda name: missed[name])
    if missed[best] == missed[worst]:
        return [f"All {len(missed)} settings recompute the same share of history, {missed[best]:.1%}."]
    return [
        f"{best} recomputes least of the history, {missed[best]:.1%}, and {worst} most, {missed[worst]:.1%} "
        "(means of trials; compare them with runners/compare.py)."
    ]


def warnings(found: Evidence, groups: Sequence[TrialGroup]) -> list[str]:
    """What a reader has to know before the numbers: overload, few seeds, tiers that did nothing, a busy machine."""
    notes = [*_waiting(found, groups), *_few(found), *_tiers_unused(found)]
    shares = [float(trial.flags["others_cpu_share"]) for trial in found.trials if "others_cpu_share" in trial.flags]
    if shares and median(shares) > _BUSY:
        notes.append(
            f"Other programs used {median(shares):.0%} of this machine's CPU time meanwhile (median of trials, at most "
            f"{max(shares):.0%}): milliseconds are longer by it, and ratios less certain."
        )
    errors = {t.baseline: e for t in found.trials if (e := found.metric(t, "cost_model_error_pct")) is not None}
    off = {name: error for name, error in errors.items() if abs(error) > _MODEL_OFF_PCT}
    if off:
        each = ", ".join(f"{name} {error:+.0f} %" for name, error in off.items())
        notes.append(f"The cost model that eviction goes by was far from what was measured: {each}.")
    return notes


def _waiting(found: Evidence, groups: Sequence[TrialGroup]) -> list[str]:
    """Baselines whose first token at the last turn is mostly waiting for others: at or past saturation."""
    import pandas as pd

    late = []
    for group in groups:
        for name, trials in group.trials.items():
            turns = found.turns(trials)
            both = pd.concat([values_of(turns, "queue_ms"), values_of(turns, "ttft_ms")], axis=1, join="inner")
            last = both.sort_index().groupby(level=CONVERSATION).tail(1)
            last = last[last["ttft_ms"] > 0]
            if not last.empty and (last["queue_ms"] / last["ttft_ms"]).median() > 0.5:
                where = f" ({group.name})" if group.name else ""
                late.append(f"{name}{where} {last['queue_ms'].median():,.0f} of {last['ttft_ms'].median():,.0f} ms")
    if not late:
        return []
    return [
        "Near saturation, where most of the time to the last turn's first token is waiting in the queue (medians): "
        f"{', '.join(late)}. Ratios to these hold for this load, and grow with it."
    ]


def _few(found: Evidence) -> list[str]:
    seeds = {trial.seed for trial in found.trials}
    if not seeds:
        return []
    if len(seeds) == 1:
        return [
            "One seed: intervals, where there are any, are over its conversations, which met one machine at one time."
        ]
    if len(seeds) < FEWEST_GROUPS:
        return [f"{len(seeds)} seeds: no intervals below {FEWEST_GROUPS}; add seed=0,1,2,3,4."]
    return []


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


def _mean(found: Evidence, trials: Iterable[Trial], name: str) -> float | None:
    values = [value for trial in trials if (value := found.metric(trial, name)) is not None]
    return fmean(values) if values else None


def load_line(trials: Sequence[Trial]) -> str | None:
    """What was asked: the load's kind and rate, and the lengths of conversations, messages and replies."""
    plans = [trial.engine.get("workload") for trial in trials]
    known = [plan for plan in plans if isinstance(plan, Mapping)]
    if not known:
        return None
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
    return f"Load ({load}): {', '.join(parts)}." if load else None


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:,.4g}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:,.4g} to {high:,.4g}"
