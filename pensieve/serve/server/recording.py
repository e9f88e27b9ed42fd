"""serve.record=true: live turns in the results database, as the turns of a trial whose workload is whoever asked."""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from array import array
from collections.abc import Mapping
from typing import Any

from pensieve.errors import ConfigError, ResultsError
from pensieve.lab.compose.plan import TrialPlan, plan_trial
from pensieve.lab.compose.schema import TrackingConfig
from pensieve.lab.compose.settings import check, resolved
from pensieve.lab.results.identity import Identity
from pensieve.lab.trial.identity import identity_of
from pensieve.lab.trial.liveness import heartbeat
from pensieve.lab.trial.run import trial_columns
from pensieve.lab.trial.tracking import Tracking, open_named
from pensieve.serve.record import TurnRecord
from pensieve.serve.server.api import Server
from pensieve.serve.server.create import trial_fields
from pensieve.serve.server.turn import Turn

LIVE = {"name": "live"}
WRITE_EVERY_S = 1.0

log = logging.getLogger(__name__)


class Recording:
    """Turns go to a thread of its own, which writes them: no client waits for the database. Texts and tokens are not kept."""

    def __init__(self, server: Server, tracking: Tracking, trial_id: int) -> None:
        self.trial_id = trial_id
        self._server, self._store = server, tracking.store
        self._origin_s = server.system.clock.now_s()
        self._turns: queue.SimpleQueue[TurnRecord | None] = queue.SimpleQueue()  # None: the end
        self._ordinal = 0
        self._heartbeat = heartbeat(self._store, trial_id)
        self._heartbeat.__enter__()
        self._thread = threading.Thread(target=self._write, name="pensieve-recording", daemon=True)
        self._thread.start()
        server.observe(self._ended)

    def close(self) -> None:
        """Write the turns that have ended, and complete the trial."""
        self._turns.put(None)
        self._thread.join()
        self._heartbeat.__exit__(None, None, None)
        try:
            self._store.finish_trial(self.trial_id, "completed", measure_end_s=self._now_s())
        except ResultsError as error:
            log.error("the recording cannot be closed: %s", error)

    def _now_s(self) -> float:
        return self._server.system.clock.now_s() - self._origin_s

    def _ended(self, _: Turn, turn: TurnRecord) -> None:
        """Queue a turn for the writer; called in the engine's thread."""
        self._turns.put(turn)

    def _write(self) -> None:
        ended = False
        while not ended:
            batch = [self._turns.get()]
            if batch[0] is not None:
                time.sleep(WRITE_EVERY_S)
            while not self._turns.empty():
                batch.append(self._turns.get())
            ended = None in batch
            try:
                self._store.add_turns(self.trial_id, [self._row(turn) for turn in batch if turn is not None])
            except ResultsError as error:
                log.error("%s turns are not recorded: %s", len(batch), error)

    def _row(self, turn: TurnRecord) -> TurnRecord:
        """Copy a turn with its times in seconds since the recording began; the conversation keeps the turn as it is."""
        row = dataclasses.replace(turn, ordinal=self._ordinal, token_ids=array("i"), margins=array("d"))
        self._ordinal += 1
        row.shift(self._origin_s)
        return row


def live_trial(config: Mapping[str, Any]) -> tuple[TrialPlan, Identity, dict[str, Any]]:
    """A server of this configuration as a trial: its plan, its identity, and its fields as plain values."""
    plain = resolved(trial_fields(config))
    live = {**plain, "workload": LIVE}
    plan = plan_trial(check({**live, "trial": {"exclusive": False}}))
    return plan, identity_of(plan, live, entry="pensieve.serve.server.command"), live


def start_recording(server: Server, config: Mapping[str, Any]) -> Recording:
    """config: of the command, with `tracking`. Raises ConfigError for tracking=off, TrialRunning where a server of the same
    configuration records already."""
    if config["tracking"]["name"] == "off":
        raise ConfigError("serve.record=true needs a database to write to; use tracking=local or tracking=postgres.")
    tracking = open_named(TrackingConfig.model_validate(resolved({"tracking": config["tracking"]})["tracking"]))
    columns = trial_columns(*live_trial(config))
    settings = server.system.settings()
    known = {name: settings[name] for name in ("gpu_tokens", "cpu_tokens", "gpu_bytes", "cpu_bytes")}
    trial_id = tracking.store.begin_trial({**columns, **known, "engine": settings, "measure_start_s": 0.0})
    return Recording(server, tracking, trial_id)
