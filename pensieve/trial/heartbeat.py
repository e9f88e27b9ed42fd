"""A thread that says that a trial is alive, so that a dead one can be told from a long one."""

from __future__ import annotations

import logging
import threading
from types import TracebackType

from pensieve.errors import ResultsError
from pensieve.results.store import ResultsStore

INTERVAL_S = 15.0  # well below the 60 s after which a silent trial counts as dead

log = logging.getLogger(__name__)


class Heartbeat:
    """Beats while the block runs. A beat that fails is logged and tried again: the trial itself will say more."""

    def __init__(self, store: ResultsStore, trial_id: int, interval_s: float = INTERVAL_S) -> None:
        self._store = store
        self._trial_id = trial_id
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"heartbeat-{trial_id}", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self._store.heartbeat(self._trial_id)
            except ResultsError as error:
                log.warning("heartbeat of trial %s: %s", self._trial_id, error)
