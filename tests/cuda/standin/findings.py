"""What is found, and where in the program."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_HERE = str(Path(__file__).parent)
_ROOT = str(Path(__file__).resolve().parents[3])
_NOT_OURS = (_HERE, "site-packages", "contextlib.py", "threading.py", "/triton/")


@dataclass(frozen=True, slots=True)
class Finding:
    """where: up to three places of the project, the innermost first."""

    kind: str
    text: str
    where: str

    def __str__(self) -> str:
        return f"[{self.kind}] {self.text}, at {self.where}"


def here() -> str:
    """The innermost places of the project in the call under way, else of its tests."""
    frames = [f for f in traceback.extract_stack() if not any(part in f.filename for part in _NOT_OURS)]
    ours = [f for f in frames if f.filename.startswith(f"{_ROOT}/pensieve")] or frames
    return " < ".join(f"{f.filename.removeprefix(_ROOT + '/')}:{f.lineno} {f.name}" for f in reversed(ours[-3:]))


def listed(findings: Iterable[Finding], most: int = 8) -> str:
    """One line each, equal ones counted: for the message of an assertion."""
    counts: dict[str, int] = {}
    for finding in findings:
        counts[str(finding)] = counts.get(str(finding), 0) + 1
    lines = [f"{count} x {text}" for text, count in list(counts.items())[:most]]
    return "\n".join([*lines, *([f"and {len(counts) - most} others"] if len(counts) > most else [])])
