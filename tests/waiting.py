"""Waiting for what other threads and processes do: no test passes or fails by how fast a machine is."""

import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

PATIENCE_S = 100.0
"""For what happens at once where nothing is wrong: what did not come by then is taken to hang."""


def until(holds: Callable[[], Any], seconds: float = PATIENCE_S) -> bool:
    """Whether it holds by then."""
    ends = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > ends:
            return False
        time.sleep(0.002)
    return True


def descendants() -> set[int]:
    """Ids of all processes that this one and those have started."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


class Side:
    """A call in a thread of its own."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call, *arguments), daemon=True)
        self._thread.start()

    def ended(self) -> bool:
        """Waits for its end, and gives up on it after PATIENCE_S."""
        return self.ends_within(PATIENCE_S)

    def ends_within(self, seconds: float) -> bool:
        """For what must not happen: time enough to go wrong."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self, call: Any, *arguments: Any) -> None:
        try:
            self.result = call(*arguments)
        except BaseException as error:
            self.error = error
