"""The processes of a tensor-parallel worker: rank 0, which takes plans from the trial, and the others, which follow.

Rank 0 reads commands on its standard input, hands each to the others as it came, performs it with its own TorchWorker, and
answers with what all of them did. They meet in the collectives of the forward only: between plans every process waits at a
pipe, which has no time limit and tells at once that the other end is gone.

Where one of them ends, for whatever reason, rank 0 says which and ends with the others: nothing could compute without it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import IO, TYPE_CHECKING, Any, NoReturn

from pensieve.core.plan import Moved, StartReport, StepResult
from pensieve.errors import EngineFailed, PensieveError
from pensieve.plugins.engines.guard import die_with_parent
from pensieve.plugins.engines.rank_messages import (
    COLLECT,
    FORGET,
    LAUNCH,
    ROOM,
    START,
    Failure,
    Setup,
    launched,
    receive,
    send,
)

if TYPE_CHECKING:
    from pensieve.device.worker import TorchWorker

BLAME_S = 2.0  # how long rank 0, when it fails, waits to hear that another one failed first


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
        if letter == LAUNCH:
            plan, sent_ns = launched(command)
            began_ns = max(self._ready_ns, sent_ns)  # what it waited for us to be ready is not the way
            self._sent.append((len(command), time.perf_counter_ns() - began_ns))
            self.worker.launch(plan)
            answer: Any = None
        elif letter == COLLECT:
            answer = self._collected(self.worker.collect(None))
        elif letter == START:
            answer = self.worker.start(*pickle.loads(data))
        elif letter == FORGET:
            self.worker.forget()
            answer = None
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


class Together:
    """Many ranks' answers as one: a copy has ended when it has on all of them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._ended: dict[int, int] = {}  # tickets that have ended on some ranks, and on how many
        self._failed: set[int] = set()

    def result(self, results: Sequence[StepResult | None]) -> StepResult | None:
        """Of one plan, or of copies alone; `results` begin with rank 0's, who alone says what was sampled. None where no
        rank had anything to tell."""
        told = [result for result in results if result is not None]
        if not told:
            return None
        steps = {result.step for result in told}
        assert len(steps) == 1 and (steps == {None} or len(told) == self._count), "ranks perform the same plans"
        ended = [result.ended_ns for result in told if result.ended_ns is not None]
        return replace(
            told[0],
            moved=self._moved(told),
            ended_ns=max(ended) if ended else None,
            compute_ns=max(result.compute_ns for result in told),
            stall_ns=max(result.stall_ns for result in told),
            h2d_bytes=sum(result.h2d_bytes for result in told),
            d2h_bytes=sum(result.d2h_bytes for result in told),
            plan_bytes=told[0].plan_bytes,
            plan_ns=max(result.plan_ns for result in told),
            error=next((result.error for result in told if result.error is not None), None),
        )

    def _moved(self, told: Sequence[StepResult]) -> tuple[Moved, ...]:
        """The moves that are over on all ranks; one that failed on any has failed."""
        over: list[Moved] = []
        for ticket, ok, _ in (one for result in told for one in result.moved):
            if not ok:
                self._failed.add(ticket)
            ended = self._ended.pop(ticket, 0) + 1
            if ended < self._count:
                self._ended[ticket] = ended
            else:
                over.append(Moved(ticket, ticket not in self._failed))
                self._failed.discard(ticket)
        return tuple(over)

    @staticmethod
    def start(reports: Sequence[StartReport]) -> StartReport:
        """The slowest rank's times, and the pools of all together."""
        first = reports[0]
        pools = {
            name: sum(report.settings[name] for report in reports) for name in ("gpu_pool_bytes", "cpu_pool_bytes")
        }
        return replace(
            first,
            load_s=max((report.load_s for report in reports if report.load_s is not None), default=None),
            warmup_ms=max(report.warmup_ms for report in reports),
            settings={**first.settings, **pools},
        )


# -- the other ranks ------------------------------------------------------------------------------------------------------


def _follow(
    setup: Setup,
    number: int,
    commands: Connection,
    words: Connection,
    others: Sequence[Connection],
    inherited: int | None,
) -> None:
    """Perform what rank 0 hands on until it closes the pipe. others, inherited: ends of pipes that belong to rank 0, which a
    fork has too: the pipes would not break with it."""
    die_with_parent()
    for connection in others:
        connection.close()
    if inherited is not None:
        os.close(inherited)
    try:
        rank = Rank(setup, number)
        commands.send(None)
        while True:
            try:
                command = commands.recv_bytes()
            except EOFError:
                os._exit(0)
            answer = rank.perform(command)
            if command[:1] != LAUNCH:
                commands.send(answer)
    except BaseException as error:
        traceback.print_exc()
        with suppress(OSError):
            words.send(_told(error, number, len(setup.devices)))
        os._exit(1)


def _told(error: BaseException, number: int, count: int) -> PensieveError:
    """What the trial is told of it: an error for the user as it is, anything else with the rank's name."""
    if isinstance(error, PensieveError):
        return error
    first = (str(error).strip().splitlines() or ["no reason given"])[0]
    return EngineFailed(f"Rank {number} of {count} failed ({type(error).__name__}: {first}).")


# -- rank 0 ---------------------------------------------------------------------------------------------------------------


class _Others:
    """The processes of the other ranks. `blamed` is called once, in a thread, with what the first of them to end died of."""

    def __init__(self, setup: Setup, inherited: int, blamed: Callable[[PensieveError], None]) -> None:
        self._count = len(setup.devices)
        self._blamed = blamed
        # A context of CUDA does not survive a fork. Without one the imports, seconds and some 300 MB, are shared.
        forks = all(device == "cpu" for device in setup.devices)
        context: Any = multiprocessing.get_context("fork" if forks else "spawn")
        pipes = [(context.Pipe(), context.Pipe(duplex=False)) for _ in range(1, self._count)]
        self._commands: list[Connection] = [ours for (ours, _), _ in pipes]
        self._words: list[Connection] = [hears for _, (hears, _) in pipes]
        mine = [*self._commands, *self._words] if forks else []
        self._processes = []
        for number, ((_, theirs), (_, says)) in enumerate(pipes, start=1):
            its = [*mine, *(end for (_, a), (_, b) in pipes[number:] for end in (a, b) if forks)]
            process = context.Process(
                target=_follow, args=(setup, number, theirs, says, its, inherited if forks else None), daemon=True
            )
            process.start()
            theirs.close()
            says.close()
            self._processes.append(process)
        self._watch = threading.Thread(target=self._listen, name="ranks", daemon=True)
        self._watch.start()

    def tell(self, command: bytes) -> None:
        for connection in self._commands:
            connection.send_bytes(command)

    def answers(self) -> list[Any]:
        return [connection.recv() for connection in self._commands]

    def wait_to_blame(self) -> None:
        """If one of them has ended, this does not return: `blamed` ends the process."""
        self._watch.join(BLAME_S)

    def _listen(self) -> None:
        ready = wait(self._words)[0]
        number = self._words.index(ready) + 1  # type: ignore[arg-type]
        try:
            error: PensieveError = self._words[number - 1].recv()
        except (EOFError, OSError):
            process = self._processes[number - 1]
            process.join(BLAME_S)
            error = EngineFailed(f"Rank {number} of {self._count} (process {process.pid}) {_ended(process.exitcode)}.")
        self._blamed(error)


def _ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by signal {-code}"
    return f"ended with status {code}"


def main() -> NoReturn:
    """Rank 0, from its first command to its last."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print goes to the log
    source = sys.stdin.buffer
    data = receive(source)
    if data is None:
        os._exit(0)
    setup: Setup = pickle.loads(data)
    lock = threading.Lock()

    def end(error: PensieveError) -> NoReturn:
        with lock, suppress(OSError):
            send(out, pickle.dumps(Failure(error)))
        os._exit(1)  # the guard ends the others

    others: _Others | None = None
    try:
        import torch
        import torch.distributed.tensor

        from pensieve.device.attention import register

        torch.set_num_threads(1)  # a fork must find no threads; each rank then takes its own
        register()  # imports transformers
        others = _Others(setup, out.fileno(), end)
        _serve(setup, others, source, lambda answer: _answer(out, lock, answer))
    except BaseException as error:
        traceback.print_exc()
        if others is not None:
            others.wait_to_blame()
        end(_told(error, 0, len(setup.devices)))
    os._exit(0)  # a group is not left in order: the others see their pipes break


def _answer(out: IO[bytes], lock: threading.Lock, answer: Any) -> None:
    with lock:
        send(out, pickle.dumps(answer, pickle.HIGHEST_PROTOCOL))


def _serve(setup: Setup, others: _Others, source: IO[bytes], answer: Callable[[Any], None]) -> None:
    rank, together = Rank(setup, 0), Together(len(setup.devices))
    others.answers()
    answer(None)
    while (command := receive(source)) is not None:
        others.tell(command)
        own = rank.perform(command)
        if command[:1] == LAUNCH:
            continue
        every = [own, *others.answers()]
        if command[:1] == COLLECT:
            result = together.result(every)
            while result is not None and result.step is None and not result.moved:
                others.tell(command)  # some ranks have a copy behind them that others still have under way
                result = together.result([rank.perform(command), *others.answers()])
            answer(result)
        elif command[:1] == START:
            answer(Together.start(every))
        elif command[:1] == FORGET:
            answer(None)
        else:
            answer(min(every))
