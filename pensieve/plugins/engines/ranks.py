"""One of the processes that a model is divided among, and what passes between it and the trial.

Every rank reads the same commands from the trial, performs them with its own TorchWorker, and answers. The ranks meet in the
collectives of the forward only: between plans each waits at a pipe, which has no time limit and tells at once that the other
end is gone.

A plan goes out once an iteration, and so as plain tuples: pickle takes microseconds for every frozen dataclass with slots,
which came to a millisecond for the rows of a batch of 64, and to a fortieth of that for tuples (docs/tensor_parallel.md).
"""

from __future__ import annotations

import os
import pickle
import struct
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pensieve.core.plan import Move, Row, Sample, StepPlan, StepResult
from pensieve.device.asked import ModelAsked
from pensieve.errors import EngineFailed, PensieveError
from pensieve.plugins.engines.process import own_pipes

if TYPE_CHECKING:
    from pensieve.device.options import TorchOptions

# A command is a letter, and then what it needs.
LAUNCH, COLLECT, START, ROOM, FORGET = b"L", b"C", b"S", b"R", b"F"

_SENT = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class Setup:
    """What all ranks start from. asked: the model, with the threads of each; its device does not count. devices: one a rank,
    "cpu" or "cuda:N". store: the file by which they find each other, which TensorParallelWorker names."""

    asked: ModelAsked
    devices: tuple[str, ...]
    options: TorchOptions
    store: Path | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """The last answer: nothing comes after it. at_ns: of perf_counter_ns, which tells who failed first."""

    error: PensieveError
    at_ns: int


def launch(plan: StepPlan) -> bytes:
    """The command to launch a plan, with the time on the clock that all processes of a machine share (perf_counter_ns).

    It has all that a torch worker reads, not what only a simulated one repeats.
    """
    sent = _SENT.pack(time.perf_counter_ns())
    assert plan.repeat == 1
    rows = tuple((row.slot, row.runs, row.tokens, _sample(row.sample)) for row in plan.rows)
    moves = tuple((m.ticket, m.source, m.target, m.src, m.dst, m.keys, m.urgent) for m in plan.moves)
    whole = (plan.step, rows, plan.tables, moves)
    return LAUNCH + sent + pickle.dumps(whole, pickle.HIGHEST_PROTOCOL)


def launched(command: bytes) -> tuple[StepPlan, int]:
    """The plan of such a command, and when it was sent."""
    (sent_ns,) = _SENT.unpack_from(command, len(LAUNCH))
    step, rows, tables, moves = pickle.loads(memoryview(command)[len(LAUNCH) + _SENT.size :])
    return StepPlan(
        step,
        tuple(
            Row(slot, runs, tokens, None if sample is None else Sample(*sample)) for slot, runs, tokens, sample in rows
        ),
        tables,
        tuple(Move(*move) for move in moves),
    ), sent_ns


def _sample(sample: Sample | None) -> tuple[Any, ...] | None:
    if sample is None:
        return None
    return (sample.position, sample.key, sample.temperature, sample.top_p, sample.top_k)


class MachineClock:
    """time.perf_counter_ns itself, which all processes of a machine share; the trial's clock began at some value of it."""

    virtual = False

    def now_ns(self) -> int:
        return time.perf_counter_ns()

    def now_s(self) -> float:
        return time.perf_counter_ns() / 1e9


class Rank:
    """One process's worker, and when it had the plans that it was sent."""

    def __init__(self, setup: Setup, number: int) -> None:
        """Loads this rank's part of the model, as all the others do. Raises what load_model raises."""
        from pensieve.device.model import load_model, resolve_device
        from pensieve.device.worker import TorchWorker
        from pensieve.plugins.device.sharding import RankGroup

        device, store = setup.devices[number], setup.store
        assert store is not None
        ranks = RankGroup.join(number, len(setup.devices), resolve_device(device), store)
        asked = setup.asked._replace(device=device)
        model = load_model(asked, ranks)
        self.worker: TorchWorker = TorchWorker(model, asked.chunk_tokens, MachineClock(), options=setup.options)
        self._ready_ns = time.perf_counter_ns()
        self._sent: list[tuple[int, int]] = []  # size and nanoseconds on the way of each plan that was not collected

    def perform(self, command: bytes) -> Any:
        """The answer; None also where there is none to give."""
        letter, data = command[:1], command[1:]
        answer: Any = None
        if letter == LAUNCH:
            plan, sent_ns = launched(command)
            began_ns = max(self._ready_ns, sent_ns)  # what it waited for us to be ready is not the way
            self._sent.append((len(command), time.perf_counter_ns() - began_ns))
            self.worker.launch(plan)
        elif letter == COLLECT:
            answer = self._collected(self.worker.collect(None))
        elif letter == START:
            answer = self.worker.start(*pickle.loads(data))
        elif letter == FORGET:
            self.worker.forget()
        else:
            assert letter == ROOM, f"no command begins with {letter!r}"
            answer = self.worker.room()
        self._ready_ns = time.perf_counter_ns()
        return answer

    def _collected(self, result: StepResult | None) -> StepResult | None:
        if result is None or result.step is None:
            return result
        size, took_ns = self._sent.pop(0)
        return replace(result, plan_bytes=size, plan_ns=took_ns)


def main(number: int) -> NoReturn:
    """A rank's process, until the trial closes its standard input."""
    commands, answers = own_pipes()
    ranks = 0
    try:
        setup: Setup = commands.recv()
        ranks = len(setup.devices)
        rank = Rank(setup, number)
        answers.send(os.getpid())
        while True:
            try:
                command = commands.recv_bytes()
            except EOFError:
                os._exit(0)  # a group is not left in order: the others see their pipes break
            answer = rank.perform(command)
            if command[:1] != LAUNCH:
                answers.send(answer)
    except BaseException as error:
        at_ns = time.perf_counter_ns()
        traceback.print_exc()
        with suppress(OSError):
            answers.send(Failure(_told(error, number, ranks), at_ns))
        os._exit(1)


def _told(error: BaseException, number: int, count: int) -> PensieveError:
    """What the trial is told of it: an error for the user as it is, anything else with the rank's name."""
    if isinstance(error, PensieveError):
        return error
    first = (str(error).strip().splitlines() or ["no reason given"])[0]
    return EngineFailed(f"Rank {number} of {count} failed ({type(error).__name__}: {first}).")
