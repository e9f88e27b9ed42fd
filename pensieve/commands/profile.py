"""runners/profile.py: measure a machine once, for the retention value of its trials and for simulating it.

Everything is measured `rounds` times, all cells of both grids in each round, so that a busy minute hits all of them; the
median counts. What is measured are plans of this module's own, and one conversation: no trial is among them.
"""

from __future__ import annotations

import os
from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from pensieve.baselines.profiling import DECODES, decodes_s, load_s, prefill_s, profile_of
from pensieve.clock import Clock
from pensieve.compose import (
    TrialPlan,
    build_system,
    build_tokenizer,
    check,
    check_free_memory,
    outputs_folder,
    plan_trial,
)
from pensieve.compose.build import clock_and_worker
from pensieve.compose.folder import read_option
from pensieve.compose.settings import check_node
from pensieve.cost.machine_profile import Grid, MachineProfile, powers_of_two
from pensieve.errors import ConfigError, HardwareMissing
from pensieve.request import Length, Request
from pensieve.statistics import median
from pensieve.trial.liveness import device_lock
from pensieve.trial.samples import Neighbours
from pensieve.trial.terminal import say
from pensieve.worker.base import Worker

LATEST = "latest.json"
SHORTEST_CONTEXT = 32
_REPLY = 81  # tokens of the conversation that tells the host's time of an iteration
_PROMPT, _PROMPTS, _SETTLING = (
    128,
    9,
    16,
)  # tokens of a prompt, at most; how many there are; tokens that each is replied with
_SETTLED = 0.02  # of a decode: what its first take beyond that is no more than noise


class ProfileSettings(BaseModel):
    """The node `profile`. to: a file; None: profiles/<model>-<device>.json of the outputs, and latest.json. rounds: how often
    each cell is measured, at most. budget_s: of measured time, beyond which no further cell or round begins."""

    model_config = ConfigDict(extra="forbid")

    to: str | None = None
    rounds: int = Field(default=5, ge=1)
    budget_s: float = Field(default=120.0, gt=0)


def profile(config: Mapping[str, Any], _typed: Collection[str] = ()) -> int:
    """Measure, write, say where; returns the exit status."""
    settings = check_node(ProfileSettings, config, "profile")
    fields = {name: value for name, value in config.items() if name != "profile"}
    plan = plan_trial(check({**fields, "workload": read_option("workload", "chat")}))
    if plan.device.simulated:
        raise HardwareMissing(
            f"hardware={plan.config.hardware.name} is simulated, and a profile is of a real machine; use hardware=local."
        )
    if plan.config.baseline.engine is not None:
        raise ConfigError(
            f"baseline={plan.config.baseline.name} is an engine of others, and a profile is of ours; leave baseline out."
        )
    if plan.device.divided:
        raise ConfigError(f"hardware.gpus={plan.device.count}: a profile is of one device; use hardware.gpus=1.")
    with device_lock(plan.device, plan.config.trial.exclusive, say):
        check_free_memory(plan)
        found = measure_machine(plan, settings.rounds, settings.budget_s)
    folder = outputs_folder() / "profiles"
    if settings.to is not None:
        paths = [Path(settings.to)]
    else:
        name = "".join(letter if letter.isalnum() else "-" for letter in plan.device.label)
        paths = [folder / f"{plan.model.name}-{name}.json", folder / LATEST]
    for path in paths:
        found.write(path)
    say(_summary(found))
    print(f"Profile:  {paths[0]}")
    return 0


def measure_machine(plan: TrialPlan, rounds: int, budget_s: float) -> MachineProfile:
    """With the pools, batch sizes and model of the plan."""
    began, neighbours = perf_counter(), Neighbours()
    clock, worker, room = clock_and_worker(plan)
    gpu_blocks = room() if callable(room) else room
    size, batch = plan.chunk_tokens, plan.config.scheduler
    longest = min(gpu_blocks * size, plan.model.max_context)
    try:
        report = worker.start(gpu_blocks, plan.cpu_blocks)
        where = {
            **report.settings,
            "model": plan.model.name,
            "dtype": plan.model.dtype,
            "machine": plan.device.label,
            "parameters": plan.model.parameters,
        }
        transfers = min(gpu_blocks, plan.cpu_blocks)
        if not transfers:
            raise ConfigError("A profile has the copies between both tiers too; give cache.cpu a size.")
        costs = profile_of(worker, clock, size, gpu_blocks * size, plan.model.max_context, transfers, where)
        prefill, decode = measure_grids(
            worker, clock, size, gpu_blocks, longest, batch.max_batch_tokens, batch.max_batch_requests, rounds, budget_s
        )
        inward, outward = (load_s(worker, clock, transfers, inward=inward) for inward in (True, False))
    finally:
        worker.close()
    times = host_times(plan, prefill, decode, longest)
    return MachineProfile(
        costs=costs,
        prefill=prefill,
        decode=decode,
        settling_s=times.settling_s,
        block_bytes=plan.block_bytes,
        h2d_block_s=inward,
        d2h_block_s=outward,
        overhead_s=max(0.0, times.iteration_s),
        prompt_s=max(0.0, times.prompt_s),
        overlaps=plan.device.kind == "cuda",
        where=where,
        measured={
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(perf_counter() - began, 1),
            "rounds": rounds,
            "prompts": _PROMPTS,
            "iteration_less_decode_s": times.iteration_s,
            "first_token_less_prefill_s": times.prompt_s,
            "others_cpu_share": round(neighbours.share(), 3),
            "load_average": [round(load, 2) for load in os.getloadavg()],
        },
    )


def measure_grids(
    worker: Worker,
    clock: Clock,
    chunk_tokens: int,
    gpu_blocks: int,
    longest: int,
    max_batch_tokens: int,
    max_batch_requests: int,
    rounds: int,
    budget_s: float,
) -> tuple[Grid, Grid]:
    """Prefill and decode, at powers of two of queries, of requests and of context, as the pools and a batch hold them."""
    queries = powers_of_two(2, min(max_batch_tokens, longest))
    starts = (0, *powers_of_two(SHORTEST_CONTEXT, longest))
    requests = powers_of_two(1, min(max_batch_requests, max_batch_tokens))
    contexts = powers_of_two(SHORTEST_CONTEXT, longest - 1)

    def prefill(count: int, start: int) -> float | None:
        return prefill_s(worker, clock, chunk_tokens, start, start + count) if start + count <= longest else None

    def decode(count: int, context: int) -> float | None:
        return decodes_s(worker, clock, chunk_tokens, count, context, gpu_blocks)

    half = budget_s / 2
    return _grid(queries, starts, prefill, rounds, half), _grid(requests, contexts, decode, rounds, half, DECODES)


def _grid(
    rows: Sequence[int],
    columns: Sequence[int],
    cell: Callable[[int, int], float | None],
    rounds: int,
    budget_s: float,
    each: int = 1,
) -> Grid:
    """The median of each cell's rounds. A row ends where `cell` gives None, or the budget is spent; its first is always
    measured. each: how often a cell runs what it gives the seconds of."""
    seen: dict[tuple[int, int], list[float]] = defaultdict(list)
    spent = 0.0
    for index in range(rounds):
        for row in rows:
            for column in columns:
                first = index == 0 and column == columns[0]
                if (index and not seen[row, column]) or (spent > budget_s and not first):
                    break
                seconds = cell(row, column)
                if seconds is None:
                    break
                spent += seconds * each
                seen[row, column].append(seconds)
    table = [[median(seen[row, column]) for column in columns if seen[row, column]] for row in rows]
    return Grid(rows=tuple(rows), columns=tuple(columns), seconds=tuple(tuple(times) for times in table))


@dataclass(frozen=True, slots=True)
class HostTimes:
    """What a conversation takes beyond what the worker takes for its iterations. iteration_s: of each, long after the last
    prefill. prompt_s: from the arrival of a prompt at an idle engine to its first token, beyond that. settling_s: the first
    decodes after a prefill, each beyond that. The first two are below 0 where the worker was slower by itself."""

    iteration_s: float
    prompt_s: float
    settling_s: tuple[float, ...]


def host_times(plan: TrialPlan, prefill: Grid, decode: Grid, longest: int) -> HostTimes:
    """Medians of one long reply, and of prompts one after another with short ones: as in a trial, a prefill follows decodes
    and an idle engine, and finds a processor's caches full of what those read. longest: tokens of a conversation, at most."""
    prompt_tokens = min(_PROMPT, longest // 4)
    tokenizer = build_tokenizer(plan.config.model, plan.model.vocab, simulated=False)
    system = build_system(plan, tokenizer)
    system.start()
    try:
        prompt = array("i", (place % plan.model.vocab for place in range(prompt_tokens)))
        replies = [min(_REPLY, longest - prompt_tokens), *([1 + _SETTLING] * _PROMPTS)]
        turns = [
            system.ask(Request(id=1 + place, session=f"profile-{place}", turn=1, prompt=prompt, output=Length(reply)))
            for place, reply in enumerate(replies)
        ]
    finally:
        system.close()
    beyond = [_gaps_s(turn.emitted_s, prompt_tokens, decode) for turn in turns]
    iteration_s = median(beyond[0][_SETTLING:])
    firsts = [turn.first_token_s - turn.arrived_s for turn in turns[1:] if turn.first_token_s and turn.arrived_s]
    first_s = median(firsts) - prefill.at(prompt_tokens, 0) - iteration_s
    settling: list[float] = []
    for place in range(_SETTLING):
        more = median([gaps[place] for gaps in beyond[1:]]) - iteration_s
        if more <= _SETTLED * decode.at(1, prompt_tokens):
            break
        settling.append(more)
    return HostTimes(iteration_s, first_s, tuple(settling))


def _gaps_s(ends_s: Sequence[float], prompt_tokens: int, decode: Grid) -> list[float]:
    """Between the tokens of a reply, less what an iteration takes by itself."""
    gaps = pairwise(ends_s)
    return [end - begin - decode.at(1, prompt_tokens + place) for place, (begin, end) in enumerate(gaps)]


def _summary(found: MachineProfile) -> str:
    busy = found.measured["others_cpu_share"]
    one, many = found.decode.at(1, SHORTEST_CONTEXT), found.decode.at(found.decode.rows[-1], SHORTEST_CONTEXT)
    text = (
        f"{found.where['model']} {found.where['dtype']} on {found.where['machine']}: a token of one request takes "
        f"{1e3 * one:.2f} ms, of {found.decode.rows[-1]} requests {1e3 * many:.2f} ms, the host {1e3 * found.overhead_s:.2f} "
        f"ms an iteration and {1e3 * found.prompt_s:.2f} ms a prompt, a block of {found.costs.chunk_tokens} tokens "
        f"{1e6 * found.h2d_block_s:.0f} us to load."
    )
    if busy > BUSY_SHARE:
        text += f" Other programs used {busy:.0%} of this machine meanwhile: measure again when it is idle."
    return text


BUSY_SHARE = 0.1
