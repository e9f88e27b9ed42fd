"""A trial does not outlive whoever started it: after kill -9 of a sweep, its trials must be free to run again."""

from __future__ import annotations

import functools
import logging
import os
import threading
from datetime import UTC, datetime

from pensieve.results.process import Owner, is_alive, this_process

INTERVAL_S = 0.25
ORPHANED = 3  # exit status; nobody is left to read it

log = logging.getLogger(__name__)


@functools.lru_cache(maxsize=8)  # a process that runs many jobs of one sweep watches once
def end_with(owner: Owner) -> None:
    """End this process, at once and unfinished, when the owner is gone; nothing to watch on another host or in itself.

    The trial's row stays `running` with a process that is dead, which is how the next run knows what to do with it.
    """
    me = this_process()
    if owner.host == me.host and owner.pid != me.pid:
        threading.Thread(target=_watch, args=(owner,), name=f"orphan-{owner.pid}", daemon=True).start()


def _watch(owner: Owner) -> None:
    pause = threading.Event()
    while not pause.wait(INTERVAL_S):
        now = datetime.now(UTC)
        if not is_alive(owner, now, now):
            log.error("process %s, which started this trial, is gone; the trial ends too", owner.pid)
            os._exit(ORPHANED)  # no thread of ours can stop the others in any other way
