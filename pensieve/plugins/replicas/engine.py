"""What runs in the process of a replica: one engine, and the calls that reach it through a pipe."""

import logging
import os
import threading
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from pensieve.core.plan import StartReport
from pensieve.core.request import Event, Request
from pensieve.errors import PensieveError, WorkerError
from pensieve.lab.compose.build import build_system, check_free_memory
from pensieve.lab.compose.model_files import build_tokenizer
from pensieve.lab.compose.plan import plan_trial
from pensieve.lab.compose.settings import check
from pensieve.plugins.engines.process import own_pipes
from pensieve.serve.systems.base import AnsweringSystem

CRASHED = 70  # the exit status of a replica whose engine stopped

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Described:
    """A replica that is ready."""

    report: StartReport
    settings: dict[str, Any]
    chunk_tokens: int


class EngineReplica:
    """Answers commands (number, method, arguments) by (number, what it returned), where they have a number, and tells events
    of requests as (None, event). A method is one of the system's.

    later_s: by how much a time is more on the system's clock than on the caller's, which times that come and go are of. An
    engine that crashed serves nobody any more, so it ends its process: another is started, and whoever asked asks again.
    """

    streams = True  # as a Listener

    def __init__(self, system: AnsweringSystem, answers: Connection, later_s: float) -> None:
        self._system, self._answers, self._later_s = system, answers, later_s
        self._telling = threading.Lock()

    def serve(self, commands: Connection) -> None:
        """Raises EOFError once the caller is gone."""
        while True:
            number, method, given = commands.recv()
            call = self._begin if method == "begin" else getattr(self._system, method)
            answer = call(*given)
            if number is not None:
                self._tell(number, answer)

    def _begin(self, request: Request) -> None:
        self._system.begin(replace(request, intended_s=request.intended_s + self._later_s), self)

    def happened(self, event: Event) -> None:
        if (turn := event.turn) is not None:
            turn.shift(self._later_s)
            turn.misses = tuple(
                one if one.evicted_s is None else replace(one, evicted_s=one.evicted_s - self._later_s)
                for one in turn.misses
            )
        self._tell(None, event._replace(at_s=event.at_s - self._later_s))

    def failed(self, error: WorkerError) -> None:
        log.error("%s This replica ends.", error)
        logging.shutdown()
        os._exit(CRASHED)

    def _tell(self, number: int | None, said: object) -> None:
        with self._telling:
            self._answers.send((number, said))


def main() -> None:
    """The process of a replica. It is sent the fields of a trial's configuration, and when the caller's clock began
    (time.perf_counter, which all processes of a machine share); it says Described, or its error, and serves from then on."""
    commands, answers = own_pipes()
    fields, began_s = commands.recv()
    try:
        config = check(fields)
        plan = plan_trial(config)
        check_free_memory(plan)
        system = build_system(plan, build_tokenizer(config.model, plan.model.vocab, simulated=False))
        report = system.start()
    except PensieveError as error:
        answers.send(error)
        os._exit(1)
    later_s = system.clock.now_s() - (time.perf_counter() - began_s)
    answers.send(Described(report, system.settings(), system.chunk_tokens))
    try:
        EngineReplica(system, answers, later_s).serve(commands)
    except (EOFError, OSError):
        os._exit(0)
