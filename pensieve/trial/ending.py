"""A sweep's last words, said however its command ends: finished, failed, interrupted, or with a worker that was killed.

Hydra does not call on_multirun_end when a launcher raised or a job left by SystemExit; the edge to the user does this.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from pensieve.errors import PensieveError

log = logging.getLogger(__name__)

_open: Callable[[str], object] | None = None


def owes(close: Callable[[str], object]) -> None:
    """From now on the command owes this call, with the status of the sweep that it runs."""
    global _open
    _open = close


def settle(status: str) -> None:
    """Make the call that is owed, once; what goes wrong in it must not hide why the command ends."""
    global _open
    close, _open = _open, None
    if close is None:
        return
    try:
        close(status)
    except (PensieveError, OSError) as error:
        log.warning("the sweep could not be closed: %s", error)


def settled() -> None:
    """Nothing is owed any more."""
    global _open
    _open = None
