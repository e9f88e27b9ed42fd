"""What a sweep found, in a sentence a stranger understands, and the load it found it at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import log
from statistics import fmean
from typing import TYPE_CHECKING

from pensieve.results.frame import PAPERS, conversation_ends, found_more, paired, speed_up, values_of
from pensieve.results.schema import Trial
from pensieve.results.trials import Evidence, TrialGroup
from pensieve.statistics import PairedRatio

if TYPE_CHECKING:
    import pandas as pd

OURS = "pensieve"
REFERENCE = "stateless"
_GROUPS_SHOWN = 4  # sentences that anybody reads; of more groups one sentence gives the least and the most
_PRINTED_ALIKE = 0.005  # of ratios: "1.00×"
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
    """One sentence a group where Pensieve ran beside others, one for all where these are many; where it did not, how much
    longer the others take than the quickest; where only policies or sizes differ, which recompute least, and what the
    paper's policy is beside the others.

    ratios: of each of found.groups(), its advantages. Empty where there is nothing to compare.
    """
    groups = found.groups()
    lost = [_mostly_lost(found, group) for group in groups]
    kept = [
        {} if OURS in gone else {name: ratio for name, ratio in own.items() if name not in gone}
        for own, gone in zip(ratios, lost, strict=True)
    ]
    beside = [(group, own) for group, own in zip(groups, kept, strict=True) if own]
    told = [
        _not_compared(group, gone) for group, gone in zip(groups, lost, strict=True) if gone and len(group.trials) > 1
    ]
    if len(told) > _GROUPS_SHOWN:
        told = [f"In {len(told)} settings a baseline completed under half of its turns; those few are not compared."]
    if beside and len(beside) <= _GROUPS_SHOWN:
        return [*(_of_group(found, group, own) for group, own in beside), *told, *_of_the_papers_policy(found, groups)]
    if beside:
        return [_over_groups(beside), *told, *_of_the_papers_policy(found, groups)]
    names = {name for group in groups for name in group.trials}
    if len(names) > 1 and OURS not in names:
        whole = [group for group, gone in zip(groups, lost, strict=True) if not gone]
        return [*_beside_the_quickest(found, whole), *told]
    if told:
        return told
    if len(groups) < 2 or len(names) > 1:
        return []
    return [*_of_alternatives(found, groups), *_of_the_papers_policy(found, groups)]


def _beside_the_quickest(found: Evidence, groups: Sequence[TrialGroup]) -> list[str]:
    """Of baselines that are none of them Pensieve: which takes least from a request's arrival to its last token, for each of
    its output tokens, and how many times as long the others take; over the settings that have all of them."""
    names = list(dict.fromkeys(name for group in groups for name in group.trials))
    read = Evidence(found.store, found.sweep.id, "latency_ms", "output_tokens")
    times_ms = [
        (group.name, {name: values_of(read.turns(group.trials[name]), "normalized_latency_ms") for name in names})
        for group in groups
        if group.trials.keys() == set(names)
    ]
    whole = [(place, own) for place, own in times_ms if all((values > 0).any() for values in own.values())]
    if not whole:
        return []
    beside = {name: [speed_up(paired(own[name], own[names[0]])) for _, own in whole] for name in names}
    known_of = {name: [log(ratio.ratio) for ratio in ratios if ratio] for name, ratios in beside.items()}
    quickest = min((name for name in names if known_of[name]), key=lambda name: fmean(known_of[name]), default=names[0])
    parts, every = [], []
    for name in names:
        ratios = [(speed_up(paired(own[name], own[quickest])), place) for place, own in whole if name != quickest]
        known = [(ratio, place) for ratio, place in ratios if ratio is not None]
        if known:
            parts.append(f"{_span(known)} as long with {name}")
            every += [ratio for ratio, _ in known]
    if not parts:
        return []
    over = f"Over {len(whole)} settings an" if len(whole) > 1 else f"{whole[0][0]}: An" if whole[0][0] else "An"
    where = "on simulated hardware, " if all(trial.simulated for trial in found.trials) else ""
    how = f"{where}from a request's arrival to its last token, over its tokens"
    return [
        f"{over} output token takes least time with {quickest} ({how}), and {_all_of(parts)}{_without_interval(every)}."
    ]


def _span(found: Sequence[tuple[PairedRatio, str]]) -> str:
    """ "1.3× (a) to 4.0× (b)", the least and the most, with the settings at which they were found."""
    (least, at_least), (most, at_most) = min(found, key=_ratio_of), max(found, key=_ratio_of)
    if times(least) == times(most):
        return times(least) if len(found) > 1 or not at_least else f"{times(least)} ({at_least})"
    return f"{times(least)} ({at_least}) to {times(most)} ({at_most})"


def _mostly_lost(found: Evidence, group: TrialGroup) -> dict[str, tuple[int, int]]:
    """The baselines that completed under half of their turns: how many, of how many. Those few had the machine to
    themselves."""
    counts = {}
    for name, trials in group.trials.items():
        done = sum(int(found.metric(trial, "turns", "completed") or 0) for trial in trials)
        asked = done + found.incomplete(trials).total()
        if 2 * done < asked:
            counts[name] = (done, asked)
    return counts


def _not_compared(group: TrialGroup, lost: Mapping[str, tuple[int, int]]) -> str:
    at = f"{group.name}: " if group.name else ""
    each = _all_of([f"{name} completed {done:,} of {asked:,} turns" for name, (done, asked) in lost.items()])
    return f"{at}{each}; those few are not compared."


def _over_groups(beside: Sequence[tuple[TrialGroup, Mapping[str, PairedRatio]]]) -> str:
    """In how many settings Pensieve is ahead of each other baseline, and the least and the most of the ratio, with the
    settings at which they were found."""
    others = dict.fromkeys(name for _, ratios in beside for name in ratios)
    parts = [
        _over_settings(other, [(ratios[other], group.name) for group, ratios in beside if other in ratios])
        for other in others
    ]
    simulated = [all(trial.simulated for trial in group.trials[OURS]) for group, _ in beside]
    where = "on simulated hardware " if all(simulated) else ""
    partly = f" ({sum(simulated)} of them simulated)" if any(simulated) and not all(simulated) else ""
    doubt = _without_interval([ratio for _, ratios in beside for ratio in ratios.values()])
    told = f"Pensieve's first token {where}{', and '.join(parts)}{doubt}"
    return f"At a conversation's last turn, over {len(beside)} settings{partly}, {told}."


def _over_settings(other: str, found: Sequence[tuple[PairedRatio, str]]) -> str:
    """ "comes 1.3× (a) to 4.0× (b) as soon as stateless serving's", where it is ahead in all settings; else "is faster than
    stateless serving's in 3 of 5 settings, slower in 1, not told apart in 1 (0.80× (a) to 4.0× (b) as soon)"."""
    span = _span(found)
    sides = Counter(_side(ratio) for ratio, _ in found)
    if sides[1] == len(found):
        return f"comes {span} as soon as {_name(other)}"
    return (
        f"is faster than {_name(other)} in {sides[1]} of {len(found)} settings, slower in {sides[-1]}, not told apart in "
        f"{sides[0]} ({span} as soon)"
    )


def _ratio_of(found: tuple[PairedRatio, str]) -> float:
    return found[0].ratio


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
    doubt = _without_interval(list(ratios.values()))
    sentence = f"{at}At a conversation's last turn Pensieve's first token {simulated}{', and '.join(parts)}{doubt}"
    return f"{sentence}{_sources(found, group)}."


def _without_interval(ratios: Sequence[PairedRatio]) -> str:
    """What a sentence adds where none of its ratios has an interval."""
    if any(ratio.ci_low is not None for ratio in ratios):
        return ""
    return f" ({_counted(min(ratios, key=lambda ratio: ratio.groups))}: no interval)"


def _counted(ratio: PairedRatio) -> str:
    return f"{ratio.groups} {'seeds' if ratio.n_seeds > 1 else 'conversations'}"


def _side(ratio: PairedRatio, level: float = 1, alike: float = _PRINTED_ALIKE) -> int:
    """1: above the level with its interval; -1: below; 0: not told apart. Without an interval the ratio alone decides, unless
    it is as near to the level as `alike`."""
    low, high = (ratio.ratio if end is None else end for end in (ratio.ci_low, ratio.ci_high))
    if ratio.ci_low is None and abs(ratio.ratio - level) < alike:
        return 0
    return 1 if low > level else -1 if high < level else 0


def _listed(ratios: Mapping[str, PairedRatio], faster: bool = True) -> str:
    """ "6.6× [3.1, 17] as soon as stateless serving's and ...", or "gpu_only's (1.04× [0.95, 1.13])"."""
    if faster:
        return _all_of([f"{times(ratio)} as soon as {_name(name)}" for name, ratio in ratios.items()])
    return _all_of([f"{_name(name)} ({times(ratio)})" for name, ratio in ratios.items()])


def _name(baseline: str) -> str:
    return _NAMES.get(baseline, f"{baseline}'s")


def _some_of(names: Sequence[str]) -> str:
    return _all_of(names) if len(names) <= _GROUPS_SHOWN else f"{len(names)} settings"


def _all_of(parts: Sequence[str]) -> str:
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
    gpu, cpu, disk, missed = (found.mean(group.trials[OURS], name) for name in names)
    if gpu is None or cpu is None or missed is None:
        return ""
    read = f"{disk:.0%} from disk, " if disk else ""
    return f"; of its history {gpu:.0%} was found on GPU, {cpu:.0%} came from CPU, {read}{missed:.0%} was recomputed"


def _of_alternatives(found: Evidence, groups: Sequence[TrialGroup]) -> list[str]:
    """Several settings of one baseline: which had to recompute least, and which most. Nothing where some served less than was
    asked, since nobody knows what the rest would have found."""
    if any(found.incomplete(trials) for group in groups for trials in group.trials.values()):
        return []
    missed = {}
    for group in groups:
        [trials] = group.trials.values()
        rate = found.mean(trials, "miss_rate")
        if rate is not None:
            missed[group.name] = rate
    if len(missed) < 2:
        return []
    shown = {name: f"{rate:.1%}" for name, rate in missed.items()}
    least, most = shown[min(missed, key=lambda name: missed[name])], shown[max(missed, key=lambda name: missed[name])]
    if least == most:
        return [f"All {len(missed)} settings recompute the same share of history, {least}."]
    best, worst = ([name for name in shown if shown[name] == share] for share in (least, most))
    recompute = "recomputes" if len(best) == 1 else "recompute"
    return [
        f"{_some_of(best)} {recompute} least of the history, {least}, and {_some_of(worst)} most, {most} (means of trials; "
        "compare them with runners/compare.py)."
    ]


def _of_the_papers_policy(found: Evidence, groups: Sequence[TrialGroup]) -> list[str]:
    """How much more or less of the history the paper's policy recomputes than each other one; a sentence for each setting of
    the other axes."""
    sentences = []
    for group in groups:
        baseline = OURS if OURS in group.trials else next(iter(group.trials))
        share = found.mean(group.trials[baseline], "miss_rate")
        if group.at.get("eviction") != PAPERS or share is None:
            continue
        turns = found.turns(group.trials[baseline])
        beside: dict[str, PairedRatio] = {}
        for other in groups:
            if other is not group and {**other.at, "eviction": PAPERS} == group.at:
                more = found_more(found.turns(other.trials.get(baseline, ())), turns)
                if more is not None:
                    beside[other.at["eviction"]] = more
        differ = share > 0 or any(more.ratio for more in beside.values())  # else nobody recomputed anything
        if beside and differ:
            rest = "".join(f"{axis}={value}, " for axis, value in group.at.items() if axis != "eviction")
            sentences.append(f"{rest}{PAPERS}, the paper's policy, recomputes {share:.1%}: {apart(beside)}.")
    return sentences if len(sentences) <= _GROUPS_SHOWN else []


def apart(beside: Mapping[str, PairedRatio]) -> str:
    """ "more than lru by 1.6 [0.9, 2.3], not told apart from fifo (0.1 [-0.3, 0.5]) (percentage points ...)".

    beside: of each policy how much more than with it was recomputed, as a share of the history.
    """
    sides: dict[str, list[str]] = {"more than": [], "less than": [], "the same as": [], "not told apart from": []}
    for policy, more in beside.items():
        side = _side(more, level=0, alike=0)
        sign = -1 if side < 0 else 1
        digits = 1 if abs(more.ratio) >= 0.0095 else 2
        points = f"{100 * sign * more.ratio + 0.0:.{digits}f}"
        if more.ci_low is not None and more.ci_high is not None:
            ends = sorted((sign * more.ci_low, sign * more.ci_high))
            points += f" [{100 * ends[0]:.{digits}f}, {100 * ends[1]:.{digits}f}]"
        if more.ratio == 0 and more.ci_low == more.ci_high:
            sides["the same as"].append(policy)
        elif side:
            sides["more than" if side > 0 else "less than"].append(f"{policy} by {points}")
        else:
            sides["not told apart from"].append(f"{policy} ({points})")
    of = next(iter(beside.values()))
    doubt = f"; {_counted(of)}: no interval" if all(more.ci_low is None for more in beside.values()) else ""
    told = ", ".join(f"{words} {_all_of(those)}" for words, those in sides.items() if those)
    return f"{told} (percentage points of the history, paired by seed and conversation{doubt})"


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
