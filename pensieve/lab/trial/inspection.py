"""workload.inspect=true: describe what a workload would ask and how that fits the cache; no engine, no database."""

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import mean
from typing import NamedTuple

from pensieve.core.session import common_prefix
from pensieve.lab.compose.build import make_workload
from pensieve.lab.compose.model_files import build_tokenizer
from pensieve.lab.compose.plan import TrialPlan, plan_trial
from pensieve.lab.compose.settings import TrialConfig
from pensieve.lab.reuse import played
from pensieve.lab.statistics import nearest_rank
from pensieve.lab.workload.base import Workload, WorkloadPlan, byte_notes, context_cuts, cut_by_context
from pensieve.serve.record import is_measured

_SAME = {"baseline", "eviction", "scheduler", "tracking", "trial", "slo", "repeat"}
"""Groups that do not change what is asked."""


def print_inspections(configs: Iterable[TrialConfig]) -> None:
    """Print each different workload of these configurations once. Raises what composing and building it raises."""
    for config in {config.model_dump_json(exclude=_SAME): config for config in configs}.values():
        plan = plan_trial(config)
        print(*inspection_lines(plan, inspection_of(plan)), "", sep="\n", flush=True)


class Asked(NamedTuple):
    """A turn. new, reply, prompt: tokens of what is sent anew, of the (longest) reply, and of the whole prompt with its
    history."""

    session: str
    at_s: float
    new: int
    reply: int
    prompt: int


class Inspection(NamedTuple):
    """turns: the measured ones. warmup_turns: the others."""

    plan: WorkloadPlan
    turns: Sequence[Asked]
    warmup_turns: int

    @property
    def sessions(self) -> int:
        return len({turn.session for turn in self.turns})

    @property
    def reuse(self) -> float:
        """Share of prompt tokens that were said before in the same conversation."""
        whole = sum(turn.prompt for turn in self.turns)
        return 1.0 - sum(turn.new for turn in self.turns) / whole if whole else 0.0

    @property
    def span_s(self) -> float:
        """First to last arrival if every reply took no time. Arrivals over it are an upper bound of a rate where the next
        turn waits for the reply."""
        times = [turn.at_s for turn in self.turns] or [0.0]
        return max(times) - min(times)


def inspection_of(plan: TrialPlan) -> Inspection:
    """The tokenizer is the model's where that is on this machine: an inspection downloads nothing."""
    return inspect(make_workload(plan, build_tokenizer(plan.config.model, plan.model.vocab, simulated=True)))


def inspect(workload: Workload) -> Inspection:
    """The workload is used up."""
    plan, turns, others = workload.describe(), list[Asked](), 0
    for request, held in played(workload):
        prompt, history = request.prompt, request.history
        known = min(common_prefix(held, prompt) if history is None else history.tokens, len(prompt) - 1)
        reply = request.output.max_new_tokens
        if is_measured(request.phase):
            turns.append(Asked(request.session, request.intended_s, len(prompt) - known, reply, len(prompt)))
        else:
            others += 1
    return Inspection(plan, turns, others)


def inspection_lines(plan: TrialPlan, found: Inspection) -> list[str]:
    """The inspection as a page of text; what the model's context cuts off comes first, since the rest is without it."""
    turns, facts, working = found.turns, found.plan.facts, found.plan.working_set_tokens
    each = list(Counter(turn.session for turn in turns).values()) or [0]
    span_s = found.span_s or float("inf")  # all at once
    sizes = {
        "cache.gpu": plan.budget_gpu_blocks,
        "cache.gpu + cache.cpu": plan.budget_gpu_blocks + plan.budget_cpu_blocks,
    }
    tiers = [(name, blocks * plan.chunk_tokens) for name, blocks in sizes.items()]
    rows = {
        "load": f"{found.plan.load}, cache {found.plan.cache_state} at the start",
        "sessions": f"{found.sessions:,}, of {mean(each):.2f} turns, at most {max(each):,}",
        "turns": f"{len(turns):,} measured, {found.warmup_turns:,} warm-up",
        "new tokens a turn": _spread([turn.new for turn in turns]),
        "reply tokens a turn": _spread([turn.reply for turn in turns]),
        "prompt tokens a turn": _spread([turn.prompt for turn in turns]),
        "reuse": f"{found.reuse:.1%} of all prompt tokens were said before in their own session",
        "rates": f"{found.sessions / span_s:.3g} sessions/s and {len(turns) / span_s:.3g} requests/s over "
        f"{found.span_s:,.1f} s, if every reply took no time",
        "working set": f"{working:,} tokens = "
        + ", ".join(f"{working / size:.2f} x {name} ({size:,})" for name, size in tiers),
        **{name: str(value) for name, value in facts.items()},
    }
    title = f"workload={plan.config.workload.get('name')}, seed {plan.config.seed}, {plan.model.name}, nothing was run"
    width = max(map(len, rows))
    cut = cut_by_context([facts])
    notes = [*([context_cuts(cut)] if cut else []), *byte_notes(facts)]
    return [title, *notes, *(f"  {name:<{width}}  {text}" for name, text in rows.items())]


def _spread(values: Sequence[int]) -> str:
    """Of each turn; percentiles by nearest rank."""
    values = values or [0]
    p50, p90 = (int(nearest_rank(values, p)) for p in (0.5, 0.9))
    return f"mean {mean(values):,.1f}, p50 {p50:,}, p90 {p90:,}, largest {max(values):,}; {sum(values):,} in all"
