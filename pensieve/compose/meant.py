"""What typed overrides mean before Hydra composes them: `workload.path` alone names recorded conversations."""

from __future__ import annotations

from collections.abc import Sequence

_RECORDED = "workload=trace"
_SIMULATED = ("model=llama3_8b", "cache=small", "hardware=sim_a100_80g")
"""Where recorded conversations are replayed unless something is chosen: recorded pauses take no real time there."""


def as_meant(arguments: Sequence[str], config_name: str = "config") -> tuple[list[str], list[str]]:
    """The command line with what it implies, and a line for people on each change. config_name: as of `guarded`."""
    added: list[str] = []
    if _has(arguments, "workload.path=") and not _has(arguments, "workload=", "experiment=", "replay="):
        added.append(_RECORDED)
        if config_name == "config" and not _has(arguments, "model", "cache", "hardware"):
            added.extend(_SIMULATED)
    notes = [f"workload.path names recorded conversations; replayed with {' '.join(added)}."] if added else []
    return [*arguments, *added], notes


def _has(arguments: Sequence[str], *beginnings: str) -> bool:
    return any(text.lstrip("+").startswith(beginnings) for text in arguments)
