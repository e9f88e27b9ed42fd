"""Ctrl-C that is not lost.

Python raises KeyboardInterrupt wherever the program happens to be, and inside a weak reference's callback (SQLAlchemy has
many) it is printed and dropped. So the handler also remembers, and the trial asks at its safe points.
"""

from __future__ import annotations

import signal
from types import FrameType

_asked = False


def remember_interrupts() -> None:
    """Install the handler, unless the process was told to ignore Ctrl-C (as a shell's background job is)."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _handle)


def raise_if_interrupted() -> None:
    """Raises KeyboardInterrupt, once, for an interrupt that came since and was dropped on its way."""
    global _asked
    if _asked:
        _asked = False
        raise KeyboardInterrupt


def _handle(_signal: int, _frame: FrameType | None) -> None:
    global _asked
    _asked = True
    raise KeyboardInterrupt
