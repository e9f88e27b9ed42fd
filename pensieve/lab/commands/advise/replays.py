"""Recorded conversations replayed in closed loop on a simulated machine, in several ways at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

from pensieve.lab.compose.build import build_cluster, build_system, workload_context
from pensieve.lab.compose.model_files import build_tokenizer
from pensieve.lab.compose.plan import plan_trial
from pensieve.lab.compose.settings import check
from pensieve.lab.replay import replay
from pensieve.lab.statistics import NONNEGATIVE, REAL, Estimate, nearest_rank, paired_ratio
from pensieve.lab.workload.base import shuffled
from pensieve.lab.workload.fit import Fit, fitted
from pensieve.lab.workload.playback import Pauses, Playback, Recorded
from pensieve.lab.workload.recording import Blocks, Call, Conversation, hashes_of
from pensieve.serve.record import is_measured

REQUEST_S, BLOCK_S = 1e-3, 12e-6
"""What a replay takes of one core for a request and for each block of its prompt, roughly: it sizes the sample alone, so that
the sample does not depend on the machine."""
Turn = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay found. found, ttft_ms: by conversation and turn, of turns that completed; loaded: from the CPU tier.
    prompts: their tokens. failed: turns that did not complete. left_out: turns that the model's context has no room for."""

    found: Mapping[Turn, int]
    loaded: Mapping[Turn, int]
    prompts: Mapping[Turn, int]
    ttft_ms: Mapping[Turn, float]
    failed: int
    left_out: int

    @property
    def rate(self) -> float:
        return sum(self.found.values()) / max(1, sum(self.prompts.values()))

    def ttft(self, p: float) -> float | None:
        return nearest_rank(list(self.ttft_ms.values()), p) if self.ttft_ms else None


def gain(base: Replayed, other: Replayed) -> tuple[Estimate, Estimate]:
    """Share of prompt tokens found more than the base, and mean TTFT of the base over that of the other: paired by turn,
    summed by conversation, intervals from conversations (pensieve/lab/statistics.py measures their coverage)."""
    more: dict[tuple[int, str], float] = {}
    whole: dict[tuple[int, str], float] = {}
    times: tuple[dict[tuple[int, str], float], dict[tuple[int, str], float]] = ({}, {})
    for turn in base.ttft_ms.keys() & other.ttft_ms.keys():
        key = (0, turn[0])
        more[key] = more.get(key, 0.0) + other.found[turn] - base.found[turn]
        whole[key] = whole.get(key, 0.0) + base.prompts[turn]
        for sums, one in zip(times, (base, other), strict=True):
            sums[key] = sums.get(key, 0.0) + one.ttft_ms[turn]
    return paired_ratio(more, whole, of="means", support=REAL), paired_ratio(*times, of="means", support=NONNEGATIVE)


def sample(conversations: Sequence[Conversation], seconds: float, block_tokens: int) -> Sequence[Conversation]:
    """As many whole conversations, drawn at random, as one replay may take seconds of; all where they are that few."""
    chosen: list[int] = []
    left = seconds
    for index in shuffled(len(conversations), 0, "advise"):
        one = conversations[index]
        left -= sum(REQUEST_S + BLOCK_S * _tokens(call) / block_tokens for call in one.calls)
        if left < 0 and chosen:
            break
        chosen.append(index)
    return [conversations[index] for index in sorted(chosen)]


def _tokens(call: Call) -> int:
    return getattr(call.content, "tokens", 0)


def moved(conversations: Sequence[Conversation], edge: int) -> list[Conversation]:
    """The same, had nothing differed at this position from what a conversation had sent before: what differs there is sent
    behind it. Later blocks of what was sent stay as they were, as far as the prompt goes."""
    found = []
    for one in conversations:
        calls: list[Call] = []
        before: tuple[Sequence[int], Sequence[int]] | None = None
        for call in one.calls:
            if not isinstance(call.content, Blocks):
                calls.append(call)
                continue
            size = call.content.block_tokens
            own = call.content.hashes[: int(call.content.tokens // size)]
            kept = 0
            if before is not None:
                both = min(len(before[0]), len(own))
                same = next((i for i in range(both) if before[0][i] != own[i]), both)
                kept = both if int(same * size) == edge else same
            changed = [*(before[1][:kept] if before else ()), *call.content.hashes[kept:]]
            before = own, changed
            calls.append(replace(call, content=replace(call.content, hashes=hashes_of(changed))))
        found.append(replace(one, calls=tuple(calls)))
    return found


@dataclass(frozen=True, slots=True)
class Task:
    config: Mapping[str, Any]
    conversations: Sequence[Conversation]


def replayed(task: Task) -> Replayed:
    """Each request at its recorded time, but none before the turn before it is over."""
    plan = plan_trial(check(task.config))
    tokenizer = build_tokenizer(plan.config.model, plan.model.vocab, simulated=True)
    context = workload_context(plan, tokenizer)
    measured, _ = fitted(task.conversations, Fit(context))
    # No warm-up turn: a policy that counts turns would decide at another one than the recorded engine's.
    workload = Playback(context, (), measured, Recorded(), Pauses(0, 0.0), facts={})
    described = workload.describe()
    routed = plan.config.hardware.cluster.router != "single"
    system = build_cluster(plan, tokenizer, described) if routed else build_system(plan, tokenizer, described)
    system.start()
    try:
        turns = [turn for turn in replay(system, workload, keep_tokens=False).turns if is_measured(turn.phase)]
    finally:
        system.close()
    done = {
        (turn.session, turn.turn): turn for turn in turns if turn.ttft_ms is not None and turn.status == "completed"
    }
    tiers = ("gpu_hit_tokens", "cpu_hit_tokens", "disk_hit_tokens", "shared_hit_tokens")
    cut = sum(len(one.calls) for one in task.conversations) - sum(one.turns for one in measured)
    return Replayed(
        {key: sum(getattr(turn, tier) or 0 for tier in tiers) for key, turn in done.items()},
        {key: turn.cpu_hit_tokens or 0 for key, turn in done.items()},
        {key: turn.prompt_tokens or 0 for key, turn in done.items()},
        {key: turn.ttft_ms or 0.0 for key, turn in done.items()},
        len(turns) - len(done),
        cut,
    )


def replay_all(tasks: Sequence[Task]) -> Iterator[Replayed]:
    """In the order of the tasks, in as many processes as this one may use cores."""
    with ProcessPoolExecutor(min(len(tasks), len(os.sched_getaffinity(0))), get_context("spawn")) as pool:
        yield from pool.map(replayed, tasks)
