"""A Worker whose model and KV are divided among processes (hardware.gpus=N): the trial's end of it, which sends them plans.

Engine, scheduler and cache decide once, in the trial's process. A block is a block on every rank, which holds the block's
KV of its own heads, so that one plan serves all.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from pensieve.core.clock import Clock
from pensieve.core.plan import StartReport, StepPlan, StepResult
from pensieve.errors import EngineFailed, PensieveError
from pensieve.plugins.engines.process import EngineProcess
from pensieve.plugins.engines.rank_messages import COLLECT, FORGET, ROOM, START, Failure, Setup, launch, receive, send

STORE = "store"


class TensorParallelWorker:
    """Makes the processes when it is made, and returns when all have loaded their part of the model. They live no longer than
    this object, nor than the trial. Where one of them ends, whatever is called next raises its error, or EngineFailed.

    setup: without its store. Raises what load_model raises.
    """

    computes = True

    def __init__(self, setup: Setup, clock: Clock) -> None:
        self.depth = setup.options.depth
        self._clock_began_ns = time.perf_counter_ns() - clock.now_ns()
        self._folder = tempfile.TemporaryDirectory(prefix="pensieve-ranks-")
        on_gpus = any(device != "cpu" for device in setup.devices)
        environment = {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),  # the package as this process found it
            "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "0"),  # ranks load weights as a trial does
            **({} if on_gpus else {"CUDA_VISIBLE_DEVICES": ""}),
            **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
        }
        command = [sys.executable, "-P", "-c", "from pensieve.plugins.engines.ranks import main; main()"]
        self._process = EngineProcess("tensor-parallel", command, environment, talk=True)
        try:
            self._send(pickle.dumps(replace(setup, store=Path(self._folder.name) / STORE)))
            self._answer()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the process that all ranks descend from."""
        return self._process.pid

    def room(self) -> int:
        """See TorchWorker.room; the least of all ranks."""
        self._send(ROOM)
        return int(self._answer())

    def start(self, gpu_blocks: int, cpu_blocks: int) -> StartReport:
        """See TorchWorker.start. The pools in its settings are those of all ranks together."""
        self._send(START + pickle.dumps((gpu_blocks, cpu_blocks)))
        report: StartReport = self._answer()
        return report

    def launch(self, plan: StepPlan) -> None:
        self._send(launch(plan))

    def collect(self, until_ns: int | None) -> StepResult | None:
        self._send(COLLECT)
        result: StepResult | None = self._answer()
        if result is None or result.ended_ns is None:
            return result
        return replace(result, ended_ns=result.ended_ns - self._clock_began_ns)

    def forget(self) -> None:
        self._send(FORGET)
        self._answer()

    def close(self) -> None:
        """End all ranks. Safe to call twice."""
        self._process.close()
        self._folder.cleanup()

    def _send(self, command: bytes) -> None:
        try:
            send(self._process.sends, command)
        except (OSError, ValueError):  # broken, or closed
            raise self._failed() from None

    def _answer(self) -> Any:
        data = receive(self._process.receives)
        if data is None:
            raise self._failed()
        answer = pickle.loads(data)
        if isinstance(answer, Failure):
            raise self._explained(answer.error)
        return answer

    def _failed(self) -> PensieveError:
        """Of processes that are gone; they may have said why before."""
        try:
            while (data := receive(self._process.receives)) is not None:
                answer = pickle.loads(data)
                if isinstance(answer, Failure):
                    return self._explained(answer.error)
        except (OSError, ValueError):
            pass
        return self._process.failed("ended while it was needed")

    def _explained(self, error: PensieveError) -> PensieveError:
        said = self._process.last_lines()
        if not isinstance(error, EngineFailed) or not said:
            return error
        return EngineFailed(
            f"{error} A model that is divided needs all its ranks. The last lines of their log:\n{said}"
        )
