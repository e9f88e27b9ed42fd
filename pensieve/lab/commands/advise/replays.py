"""What was recorded, as conversations; and the same replayed in closed loop on a simulated machine, in several ways."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from pensieve.errors import ConfigError
from pensieve.lab.compose.build import build_cluster, build_system, workload_context
from pensieve.lab.compose.model_files import build_tokenizer
from pensieve.lab.compose.plan import plan_trial
from pensieve.lab.compose.settings import check
from pensieve.lab.replay import replay
from pensieve.lab.statistics import NONNEGATIVE, REAL, Estimate, nearest_rank, paired_ratio
from pensieve.lab.traffic.table import Exchange, Facts, Salt, exchanges, is_traffic, read_batches, read_facts
from pensieve.lab.turns import HITS
from pensieve.lab.workload.base import shuffled, uniform
from pensieve.lab.workload.fit import Fit, fitted
from pensieve.lab.workload.formats import rows_of
from pensieve.lab.workload.formats.traffic import BY_PREFIX, asked_in, conversations_of
from pensieve.lab.workload.playback import Pauses, Playback, Recorded
from pensieve.lab.workload.recording import Blocks, Call, Conversation, hashes_of
from pensieve.lab.workload.trace import without_outliers

MOST_REQUESTS = 50_000
"""In memory at once: of a longer recording whole conversations are drawn; without names, its first requests are read."""


@dataclass(frozen=True, slots=True)
class Source:
    """rows: in order of arrival, each with its conversation. named: the recording says which requests are one. in_file: all
    requests of the file. strays: requests whose time lies far from all others, left out."""

    path: Path
    facts: Facts
    rows: Sequence[tuple[Exchange, str]]
    conversations: Sequence[Conversation]
    named: bool
    in_file: int
    strays: int = 0


def open_source(path: Path, format: str | None) -> Source:
    """Raises ConfigError for a recording that lacks what advice needs, MalformedInput for one that cannot be read."""
    if is_traffic(path):
        facts = read_facts(path)
        found, in_file = _read(path)
    else:
        facts, found = rows_of(path, format, Salt(), "skip")
        in_file = len(found)
    named = all(one.session is not None and one.session_from != BY_PREFIX for one in found)
    asked = asked_in(found, facts)
    timed = facts.one_clock and any(one.arrival_s is not None for one in asked)
    if not timed or not any(one.blocks for one in asked):
        raise ConfigError(
            f"{path.name} has no {'hashes of blocks' if timed else 'times of arrival'}, and without that nobody can tell "
            "what a cache would find; record the traffic with pensieve record."
        )
    conversations, strays = without_outliers(conversations_of(asked, facts))
    names = {call.order: one.id for one in conversations for call in one.calls}
    rows = [(one, names[place]) for place, one in enumerate(asked) if place in names]
    return Source(path, facts, rows, conversations, named, in_file, strays)


def _read(path: Path) -> tuple[list[Exchange], int]:
    """The rows that fit into memory, and how many there are. What two tenants sent is made different: neither finds anything
    of the other."""
    in_file = sum(batch.num_rows for batch in read_batches(path, ["request"]))
    share = MOST_REQUESTS / max(1, in_file)
    found: list[Exchange] = []
    for batch in read_batches(path):
        if share < 1.0:
            chosen = [
                len(found) < MOST_REQUESTS if name is None else uniform(0, "advise", name) < share
                for name in batch.column("session").to_pylist()
            ]
            batch = batch.filter(pa.array(chosen))
        found += exchanges(batch)
    if len({one.tenant for one in found}) > 1:
        for one in found:
            one.session = None if one.session is None else f"{one.tenant}/{one.session}"
            one.blocks, one.output_blocks = (
                None if blocks is None else array("q", [hash((one.tenant, block)) for block in blocks])
                for blocks in (one.blocks, one.output_blocks)
            )
    return found, in_file


REQUEST_S, BLOCK_S = 1e-3, 12e-6
"""What a replay takes of one core for a request and for each block of its prompt, roughly: it sizes the sample alone, so that
the sample does not depend on the machine."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay found. turns: of those that completed, by session and turn: prompt, found and loaded (from the CPU tier)
    in tokens, ttft_ms. failed: how many did not complete. left_out: those that the model's context has no room for."""

    turns: pd.DataFrame
    failed: int
    left_out: int

    @property
    def rate(self) -> float:
        return float(self.turns.found.sum() / max(1, self.turns.prompt.sum()))

    def ttft(self, p: float) -> float | None:
        return nearest_rank(self.turns.ttft_ms.tolist(), p) if len(self.turns) else None


def gain(base: Replayed, other: Replayed) -> tuple[Estimate, Estimate]:
    """Share of prompt tokens found more than the base, and mean TTFT of the base over that of the other: paired by turn,
    summed by conversation, intervals from conversations (pensieve/lab/statistics.py measures their coverage)."""
    both = base.turns.join(other.turns.add_suffix("_other"), how="inner").groupby("session").sum()
    both.index = pd.MultiIndex.from_product([[0], both.index])
    sums = both.assign(more=both.found_other - both.found).astype(float).to_dict()
    return (
        paired_ratio(sums["more"], sums["prompt"], of="means", support=REAL),
        paired_ratio(sums["ttft_ms"], sums["ttft_ms_other"], of="means", support=NONNEGATIVE),
    )


def sample(conversations: Sequence[Conversation], seconds: float, block_tokens: int) -> Sequence[Conversation]:
    """As many whole conversations, drawn at random, as one replay may take seconds of; all where they are that few."""
    chosen: list[int] = []
    left = seconds
    for index in shuffled(len(conversations), 0, "advise"):
        one = conversations[index]
        left -= sum(REQUEST_S + BLOCK_S * getattr(call.content, "tokens", 0) / block_tokens for call in one.calls)
        if left < 0 and chosen:
            break
        chosen.append(index)
    return [conversations[index] for index in sorted(chosen)]


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
    workload = Playback(context, (), measured, Recorded(), Pauses(0, 0.0))
    described = workload.describe()
    routed = plan.config.hardware.router != "single"
    system = build_cluster(plan, tokenizer, described) if routed else build_system(plan, tokenizer, described)
    system.start()
    try:
        turns = replay(system, workload, keep_turns=False).measurement.turns.measured
    finally:
        system.close()
    done = turns.completed.where(~np.isnan(turns.completed["ttft_ms"]))
    words = done.words("session")
    found = pd.DataFrame(
        {
            "session": [words[code] for code in done.codes("session")],
            "turn": done["turn"].astype(int),
            "prompt": np.nan_to_num(done["prompt_tokens"]).astype(int),
            "found": np.nan_to_num([done[tier] for tier in HITS]).sum(axis=0).astype(int),
            "loaded": np.nan_to_num(done["cpu_hit_tokens"]).astype(int),
            "ttft_ms": done["ttft_ms"],
        }
    )
    left_out = sum(len(one.calls) for one in task.conversations) - sum(one.turns for one in measured)
    return Replayed(found.set_index(["session", "turn"]), len(turns) - len(done), left_out)


def replay_all(tasks: Sequence[Task]) -> Iterator[Replayed]:
    """In the order of the tasks, in as many processes as this one may use cores."""
    with ProcessPoolExecutor(min(len(tasks), len(os.sched_getaffinity(0))), get_context("spawn")) as pool:
        yield from pool.map(replayed, tasks)
