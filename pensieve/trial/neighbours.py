"""How busy others kept this machine's CPUs during a trial: their share is in every millisecond that was measured."""

from __future__ import annotations

import time
from contextlib import suppress

import psutil

_IDLE = ("idle", "iowait")
_COUNTED_ELSEWHERE = ("guest", "guest_nice")  # Linux counts them as user and nice already


class Neighbours:
    """Counts from its construction on. A virtual machine's stolen time is others' time too."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._began_s = time.monotonic()
        self._busy_s, self._own_s = _busy_s(), self._own_cpu_s()

    def share(self) -> float:
        """CPU time of all other processes over that of all cores, 0 to 1. Children of this process, such as an engine
        beside it, are its own."""
        available_s = (time.monotonic() - self._began_s) * (psutil.cpu_count() or 1)
        others_s = (_busy_s() - self._busy_s) - (self._own_cpu_s() - self._own_s)
        return min(1.0, max(0.0, others_s / available_s)) if available_s > 0 else 0.0

    def _own_cpu_s(self) -> float:
        total = 0.0
        for process in (self._process, *self._process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):  # it ended meanwhile: its parent's times have it
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total


def _busy_s() -> float:
    """Seconds that all cores together have worked since the machine started."""
    times = psutil.cpu_times()._asdict()
    return float(sum(seconds for name, seconds in times.items() if name not in (*_IDLE, *_COUNTED_ELSEWHERE)))
