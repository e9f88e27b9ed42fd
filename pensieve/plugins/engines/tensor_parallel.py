"""A Worker whose model and KV are divided among processes (hardware.gpus=N): the trial's end of it, and one such process.

Engine, scheduler and cache decide once, in the trial's process. A block is a block on every rank, which holds the block's
KV of its own heads, so that one plan serves all. Every rank reads the same commands, performs them with its own TorchWorker,
and answers. The ranks meet in the collectives of the forward only: between plans each waits at a pipe, which has no time
limit and tells at once that the other end is gone. Where one of the ranks ends, for whatever reason, nothing could compute
without it: the error says which, and all of them end.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pensieve.core.machine import Clock
from pensieve.core.plan import Moved, StartReport, StepPlan, StepResult
from pensieve.device.asked import ModelAsked
from pensieve.errors import EngineFailed, PensieveError
from pensieve.plugins.engines.guard import SIGNALS
from pensieve.plugins.engines.process import EngineProcess, own_pipes

if TYPE_CHECKING:
    from pensieve.device.worker import TorchOptions

BLAME_S = 2.0  # how long others are heard when one has failed: another may have failed first


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


class TensorParallelWorker:
    """Makes the processes when it is made, and returns when all have loaded their part of the model. They live no longer than
    this object, nor than the trial. Where one of them ends, whatever is called next raises its error, or EngineFailed.

    setup: without its store. pids: of the ranks. Raises what load_model raises.
    """

    computes = True

    def __init__(self, setup: Setup, clock: Clock) -> None:
        self.depth = setup.options.depth
        self._clock_began_ns = time.perf_counter_ns() - clock.now_ns()
        self._folder = tempfile.TemporaryDirectory(prefix="pensieve-ranks-")
        on_gpus = any(device != "cpu" for device in setup.devices)
        environment = {
            "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "0"),  # ranks load weights as a trial does
            **({} if on_gpus else {"CUDA_VISIBLE_DEVICES": ""}),
            **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
        }
        self._together = Together(len(setup.devices))
        self._processes: list[EngineProcess] = []
        self.pids = [0] * len(setup.devices)
        try:
            for number in range(len(setup.devices)):
                main = f"from pensieve.plugins.engines.tensor_parallel import main; main({number})"
                self._processes.append(EngineProcess.ours("tensor-parallel", main, environment, talk=True))
            self.pids = self._ask(replace(setup, store=Path(self._folder.name) / "store"))
        except BaseException:
            self.close()
            raise

    def room(self) -> int:
        """See TorchWorker.room; the least of all ranks."""
        return int(min(self._ask(("room", ()))))

    def start(self, gpu_blocks: int, cpu_blocks: int) -> StartReport:
        """See TorchWorker.start. The slowest rank's times; the pools in its settings are those of all ranks together."""
        reports: list[StartReport] = self._ask(("start", (gpu_blocks, cpu_blocks)))
        pools = {name: sum(one.settings[name] for one in reports) for name in ("gpu_pool_bytes", "cpu_pool_bytes")}
        return replace(
            reports[0],
            load_s=max((one.load_s for one in reports if one.load_s is not None), default=None),
            warmup_ms=max(one.warmup_ms for one in reports),
            settings={**reports[0].settings, **pools},
        )

    def launch(self, plan: StepPlan) -> None:
        self._send(("launch", (plan,)))

    def collect(self, until_ns: int | None) -> StepResult | None:
        result = self._together.result(self._ask(("collect", (None,))))
        if result is not None and result.step is None and not result.moved:
            return self.collect(until_ns)  # some ranks have a copy behind them that others still have under way
        if result is None or result.ended_ns is None:
            return result
        return replace(result, ended_ns=result.ended_ns - self._clock_began_ns)

    def forget(self) -> None:
        self._ask(("forget", ()))

    def close(self) -> None:
        """End all ranks. Safe to call twice."""
        for process in self._processes:
            process.close()
        self._folder.cleanup()

    def _send(self, command: object) -> None:
        """A method of TorchWorker and what it is given; at first, the setup."""
        try:
            for process in self._processes:
                process.sends.send(command)
        except OSError:  # broken, or closed
            raise self._failed({}) from None

    def _ask(self, command: object) -> list[Any]:
        """What each rank answers, in their order."""
        self._send(command)
        found: dict[int, Any] = {}
        while len(found) < len(self._processes):
            found |= self._heard(found, None)
            if any(isinstance(answer, Failure) for answer in found.values()):
                raise self._failed(found)
        return [found[number] for number in sorted(found)]

    def _heard(self, but: Mapping[int, Any], timeout_s: float | None) -> dict[int, Any]:
        """The next answers of some of the other ranks; of one that has ended without a word, a Failure before all others."""
        pipes = [process.receives for process in self._processes]
        asked = [pipe for number, pipe in enumerate(pipes) if number not in but and not pipe.closed]
        answers: dict[int, Any] = {}
        for pipe in wait(asked, timeout_s):
            number = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                answers[number] = pipes[number].recv()
            except (EOFError, OSError):
                code = self._processes[number].wait(BLAME_S) or 0
                ended = f"was killed by signal {code - SIGNALS}" if code > SIGNALS else f"ended with status {code}"
                said = f"Rank {number} of {len(self._processes)} (process {self.pids[number]}) {ended}."
                answers[number] = Failure(EngineFailed(said), 0)
        return answers

    def _failed(self, told: Mapping[int, Any]) -> PensieveError:
        """The error of the rank that failed first, also of those that say so within BLAME_S."""
        failures = {number: answer for number, answer in told.items() if isinstance(answer, Failure)}
        more = self._heard(failures, BLAME_S) if all(one.at_ns for one in failures.values()) else {}
        failures |= {number: answer for number, answer in more.items() if isinstance(answer, Failure)}
        if not failures:
            return self._processes[0].failed("ended while it was needed")
        first = min(failures, key=lambda number: failures[number].at_ns)
        error, said = failures[first].error, self._processes[first].last_lines()
        if type(error) is not EngineFailed or not said:
            return error
        return EngineFailed(f"{error} A model that is divided needs all its ranks. The last lines of its log:\n{said}")


class Together:
    """Many ranks' answers as one: a copy has ended when it has on all of them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._ended: dict[int, list[bool]] = defaultdict(list)  # by ticket, where not on all: on each whether it failed

    def result(self, results: Sequence[StepResult | None]) -> StepResult | None:
        """Of one plan, or of copies alone; `results` begin with rank 0's, who alone says what was sampled. The slowest rank's
        times, and bytes of all. None where no rank had anything to tell."""
        told = [result for result in results if result is not None]
        if not told:
            return None
        steps = {result.step for result in told}
        assert len(steps) == 1 and (steps == {None} or len(told) == self._count), "ranks perform the same plans"
        return replace(
            told[0],
            moved=self._moved(told),
            ended_ns=max((result.ended_ns for result in told if result.ended_ns is not None), default=None),
            compute_ns=max(result.compute_ns for result in told),
            stall_ns=max(result.stall_ns for result in told),
            h2d_bytes=sum(result.h2d_bytes for result in told),
            d2h_bytes=sum(result.d2h_bytes for result in told),
            error=next((result.error for result in told if result.error is not None), None),
        )

    def _moved(self, told: Sequence[StepResult]) -> tuple[Moved, ...]:
        """The moves that are over on all ranks; one that failed on any has failed."""
        over: list[Moved] = []
        for ticket, ok, _ in (one for result in told for one in result.moved):
            self._ended[ticket].append(ok)
            if len(self._ended[ticket]) == self._count:
                over.append(Moved(ticket, all(self._ended.pop(ticket))))
        return tuple(over)


# -- in the process of a rank ------------------------------------------------------------------------------------------------


def main(number: int) -> NoReturn:
    """A rank's process, until the trial closes its standard input."""
    commands, answers = own_pipes()
    try:
        import torch

        from pensieve.device.model import load_model
        from pensieve.device.sharding import RankGroup
        from pensieve.device.worker import TorchWorker
        from pensieve.serve.systems.base import WallClock

        setup: Setup = commands.recv()
        asked = setup.asked._replace(device=setup.devices[number])
        assert setup.store is not None
        ranks = RankGroup.join(number, len(setup.devices), torch.device(asked.device), setup.store)
        clock = WallClock(0)  # time.perf_counter's, which all processes of a machine share
        worker = TorchWorker(load_model(asked, ranks), asked.chunk_tokens, clock, options=setup.options)
        answers.send(os.getpid())
        while True:
            try:
                name, given = commands.recv()
            except EOFError:
                os._exit(0)  # a group is not left in order: the others see their pipes break
            answer = getattr(worker, name)(*given)
            if name != "launch":
                answers.send(answer)
    except BaseException as error:
        at_ns = time.perf_counter_ns()
        traceback.print_exc()
        if not isinstance(error, PensieveError):
            first = (str(error).strip().splitlines() or ["no reason given"])[0]
            error = EngineFailed(f"Rank {number} failed ({type(error).__name__}: {first}).")
        with suppress(OSError):
            answers.send(Failure(error, at_ns))
        os._exit(1)
