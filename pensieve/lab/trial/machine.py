"""Measure the machine that a trial runs on: the grids of its worker, and what a conversation takes beyond them.

Everything is measured `rounds` times, all cells of both grids in each round, so that a busy minute hits all of them; the
median counts. What is measured are plans and conversations of this module's own: no trial is among them.

`pensieve profile` does so by itself. A trial may have it done beside itself (trial.measure_machine): where a process's memory
happens to lie makes up to a tenth of a decode on a CPU, and so do the minutes.
"""

import os
from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

from pydantic import BaseModel, ConfigDict

from pensieve.core.machine import Clock, Worker
from pensieve.core.request import Length, Request
from pensieve.device.shelf import open_shelf
from pensieve.errors import ConfigError
from pensieve.lab.compose.build import build_system, check_free_memory, check_measurable, clock_and_worker
from pensieve.lab.compose.conf import outputs_folder, read_option
from pensieve.lab.compose.model_files import build_tokenizer
from pensieve.lab.compose.plan import TrialPlan, plan_trial
from pensieve.lab.compose.settings import check, check_node
from pensieve.lab.statistics import median
from pensieve.lab.trial.job import device_lock
from pensieve.lab.trial.samples import Neighbours
from pensieve.lab.trial.terminal import say
from pensieve.serve.record import Transcripts, TurnRecord
from pensieve.serve.systems.profiling import DECODES, decodes_s, load_s, prefill_s, profile_of
from pensieve.sim.machine_profile import Grid, MachineProfile
from pensieve.sim.profile import powers_of_two

SHORTEST_CONTEXT = 32
_REPLY = 81  # tokens of the replies that tell the host's time of an iteration
_EVERY = 3  # rounds of prompts, one such reply
_BEGUN = 32  # tokens of the first turn of a conversation, which is answered with one
_LONGEST_PROMPT = 512  # tokens
_PROMPTS = 9  # of each length
_SETTLING = 16  # tokens after the first of their replies
_ROUNDS_BESIDE, _BUDGET_BESIDE_S = 2, 60.0


def measure_machine(plan: TrialPlan, rounds: int, budget_s: float) -> MachineProfile:
    """With the pools, batch sizes and model of the plan."""
    began, neighbours = perf_counter(), Neighbours()
    clock, worker, room = clock_and_worker(plan)
    gpu_blocks = room() if callable(room) else room
    size, batch = plan.chunk_tokens, plan.config.scheduler
    longest = min(gpu_blocks * size, plan.model.max_context)
    try:
        report = worker.start(gpu_blocks, plan.cpu_blocks)
        model = {"model": plan.model.name, "parameters": plan.model.parameters}
        where = {**report.settings, **model, "dtype": plan.model.dtype, "machine": plan.device.label}
        transfers = min(gpu_blocks, plan.cpu_blocks)
        # Asked as a trial asks, so that one of this process has the same prices.
        costs = profile_of(
            worker,
            clock,
            size,
            gpu_blocks * size,
            plan.model.max_context,
            transfers,
            {**report.settings, **model},
            batch.max_batch_tokens,
        )
        prefill, decode = measure_grids(
            worker, clock, size, gpu_blocks, longest, batch.max_batch_tokens, batch.max_batch_requests, rounds, budget_s
        )
        inward, outward = (load_s(worker, clock, transfers, inward=inward) for inward in (True, False))
    finally:
        worker.close()
    found_s, reply = host_times(plan, prefill, decode, longest)
    return MachineProfile(
        costs=costs,
        prefill=prefill,
        decode=decode,
        reply=reply,
        block_bytes=plan.block_bytes,
        h2d_block_s=inward,
        d2h_block_s=outward,
        overhead_s=max(0.0, found_s),
        overlaps=plan.device.kind == "cuda",
        where=where,
        measured={
            "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "seconds": round(perf_counter() - began, 1),
            "rounds": rounds,
            "prompts": _PROMPTS,
            "iteration_less_decode_s": found_s,
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


def host_times(plan: TrialPlan, prefill: Grid, decode: Grid, longest: int) -> tuple[float, Grid]:
    """What a conversation takes beyond what the worker takes for its iterations: of each, long after the last prefill (below
    0 where the worker was slower by itself); and `reply`, as in MachineProfile.

    Medians of long replies, and of prompts of several lengths in turn with short ones. Each is the second turn of a
    conversation, as most are: its history is found. Nothing is forgotten, so that an admission has to make room as in a
    trial, which takes the host some time; what it waits for copies meanwhile, on a CPU a tenth of that, is priced apart once
    more. And as in a trial a prefill follows decodes and an idle engine, and finds a processor's caches full of what those
    read, as it leaves them full of its own. longest: tokens of a conversation, at most."""
    room = longest - _BEGUN
    shortest = SHORTEST_CONTEXT if room >= 4 * SHORTEST_CONTEXT else 4
    base, settled = min(_LONGEST_PROMPT, room // 4), min(1 + _SETTLING, room // 2)
    lengths = powers_of_two(shortest, max(shortest, min(_LONGEST_PROMPT, room - settled)))
    long, short = (base, min(_REPLY, room - base)), [(length, settled) for length in lengths]
    asked = [each for place in range(_PROMPTS) for each in ([long, *short] if place % _EVERY == 0 else short)]
    tokenizer = build_tokenizer(plan.config.model, plan.model.vocab, simulated=False)
    system = build_system(plan, tokenizer)
    answers: dict[tuple[int, int], list[TurnRecord]] = defaultdict(list)
    system.start()
    try:
        for place, (tokens, reply) in enumerate(asked):
            said = Transcripts()
            # The token before a message has no KV yet, and is computed with it.
            for turn, (count, output) in enumerate(((_BEGUN, 1), (tokens - 1, reply)), start=1):
                name, message = f"profile-{place}", array("i", (token % plan.model.vocab for token in range(count)))
                prompt = said.of(name) + message
                request = Request(2 * place + turn, name, turn, prompt, Length(output))
                answer = system.ask(request)
                said.note(request, answer)
            answers[tokens, reply].append(answer)
    finally:
        system.close()
    found_s = median([gap for turn in answers[long] for gap in _decodes_s(turn, decode)[settled - 1 :]])
    iteration_s = max(0.0, found_s)
    rows = []
    for length in lengths:
        turns = answers[length, settled]
        alone_s = prefill.at(length, _BEGUN)
        firsts = [turn.emitted_s[0] - (turn.arrived_s or 0.0) - alone_s for turn in turns]
        decodes = zip(*(_decodes_s(turn, decode) for turn in turns), strict=True)
        rows.append(tuple(max(0.0, median(seconds) - iteration_s) for seconds in (firsts, *decodes)))
    return found_s, Grid(rows=tuple(lengths), columns=tuple(range(settled)), seconds=tuple(rows))


def _decodes_s(turn: TurnRecord, decode: Grid) -> list[float]:
    """Between the tokens of a reply, less what an iteration takes by itself."""
    context, gaps = turn.prompt_tokens or 0, pairwise(turn.emitted_s)
    return [end - begin - decode.at(1, context + place) for place, (begin, end) in enumerate(gaps)]


def measure_beside(plan: TrialPlan) -> str | None:
    """Measure the machine before a real trial that asks for it (trial.measure_machine), and write the file: once a process
    for each setting, so that trials which follow each other share it. A simulation that goes by it then has met the same
    minutes, and memory that lies alike, which both move a decode on a CPU by up to a tenth.

    Returns when it was measured, for the trial's record; None where nobody asks. Raises ConfigError."""
    file = plan.config.trial.measure_machine
    if file is None or plan.device.simulated:
        return None
    batch = plan.config.scheduler
    setting = (
        *(plan.model.name, plan.model.dtype, plan.chunk_tokens, plan.gpu_blocks, plan.cpu_blocks),
        *(plan.config.hardware.threads, batch.max_batch_tokens, batch.max_batch_requests),
    )
    known = _written.get(file)
    if known is not None and known[0] == setting:
        return known[1]
    check_measurable(plan)
    path = Path(file).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # before it takes its time
    except OSError as error:
        raise ConfigError(
            f"trial.measure_machine={file} cannot be written: {error.strerror}; name another file."
        ) from None
    found = measure_machine(plan, _ROUNDS_BESIDE, _BUDGET_BESIDE_S)
    found.write(path)
    at = str(found.measured["at"])
    _written[file] = setting, at
    return at


_written: dict[str, tuple[tuple[object, ...], str]] = {}
"""What this process has measured: by file the setting, and when."""


# -- pensieve profile: once for a machine, for the retention value of its trials and for simulating it ---------------------


ROUNDS, BUDGET_S = 5, 120.0
"""How often each cell is measured at most, and seconds of measured cells beyond which no further cell or round begins."""


class ProfileSettings(BaseModel):
    """The node `profile`. to: a file; None: profiles/<model>-<device>.json of the outputs, and latest.json."""

    model_config = ConfigDict(extra="forbid")

    to: str | None = None


def profile(config: Mapping[str, Any], _typed: Collection[str] = ()) -> int:
    """Measure, write, say where; returns the exit status."""
    settings = check_node(ProfileSettings, config, "profile")
    fields = {name: value for name, value in config.items() if name != "profile"}
    plan = plan_trial(check({**fields, "workload": read_option("workload", "chat")}))
    check_measurable(plan)
    # The worker alone and the engine then read the same weights, where they lie.
    with device_lock(plan.device, plan.config.trial.exclusive), open_shelf():
        check_free_memory(plan)
        found = measure_machine(plan, ROUNDS, BUDGET_S)
    folder = outputs_folder() / "profiles"
    name = "".join(letter if letter.isalnum() else "-" for letter in plan.device.label)
    paths = [folder / f"{plan.model.name}-{name}.json", folder / "latest.json"]
    for path in [Path(settings.to)] if settings.to is not None else paths:
        found.write(path)
    say(_summary(found))
    print(f"Profile:  {settings.to or paths[0]}")
    return 0


def _summary(found: MachineProfile) -> str:
    busy = found.measured["others_cpu_share"]
    one, many = found.decode.at(1, SHORTEST_CONTEXT), found.decode.at(found.decode.rows[-1], SHORTEST_CONTEXT)
    text = (
        f"{found.where['model']} {found.where['dtype']} on {found.where['machine']}: a token of one request takes "
        f"{1e3 * one:.2f} ms, of {found.decode.rows[-1]} requests {1e3 * many:.2f} ms. The host takes "
        f"{1e3 * found.overhead_s:.2f} ms an iteration and {1e3 * found.prompt_s(128):.2f} ms a prompt. A block of "
        f"{found.costs.chunk_tokens} tokens takes {1e6 * found.h2d_block_s:.0f} us to load."
    )
    if busy > 0.1:
        text += f" Other programs used {busy:.0%} of this machine meanwhile: measure again when it is idle."
    return text
