"""What typed overrides mean before Hydra composes them: `workload.path` alone, and experiments by a short name."""

from __future__ import annotations

from collections.abc import Sequence

from pensieve.lab.compose.folder import options

_SIMULATED = ("model=llama3_8b", "cache=small", "hardware=sim_a100_80g")
"""Where recorded conversations are replayed unless something is chosen: recorded pauses take no real time there."""


def as_meant(arguments: Sequence[str], config_name: str = "config") -> tuple[list[str], list[str]]:
    """The command line with what it implies, and a line for people on each change. config_name: as of `guarded`."""
    meant = [_whole(text) for text in arguments]
    notes = [f"{typed} is now {now}." for typed, now in zip(arguments, meant, strict=True) if typed != now]
    path = next((place for place, text in enumerate(meant) if _has([text], "workload.path=")), None)
    if path is not None and not _has(meant, "workload=", "experiment=", "replay="):
        added = ["workload=trace"]
        if config_name == "config" and not _has(meant, "model", "cache", "hardware"):
            added += _SIMULATED
        notes.append(f"workload.path names recorded conversations; replayed with {' '.join(added)}.")
        meant[path:path] = (
            added  # beside it: argparse wants all overrides in one piece, and `--cfg job` may end the line
        )
    return meant, notes


def _whole(text: str) -> str:
    """experiment=NAME with its folder, where it was left out (hotness) or is a prefix (paper_eviction)."""
    name = text.removeprefix("experiment=")
    if name == text or name in (known := options("experiment")):
        return text
    for option in known:
        folder, _, own = option.rpartition("/")
        if name in (own, f"{folder}_{own}", f"{folder.removesuffix('s')}_{own}"):
            return f"experiment={option}"
    return text


def _has(arguments: Sequence[str], *beginnings: str) -> bool:
    return any(text.lstrip("+").startswith(beginnings) for text in arguments)
