"""The idea as one picture: where the tokens of one conversation are at each of its turns, kept and forgotten.

    python runners/run.py -m hardware=sim_a100_80g model=llama3_8b cache=small seed=0 baseline=pensieve,stateless
    python analysis/idea.py [--sweep N] [--to docs/idea.png]

Each bar is the prompt of one turn, from its row of table `turn`: what was found on the GPU, what came back from CPU memory
or disk, what was computed again, and what is new.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis import style
from pensieve.core.request import is_measured
from pensieve.errors import MissingSeries, PensieveError
from pensieve.lab.results.store import JobResult, ResultsStore, open_store

COMMAND = (
    "python runners/run.py -m hardware=sim_a100_80g model=llama3_8b cache=small seed=0 baseline=pensieve,stateless"
)
SHOWN = ("pensieve", "stateless")
PARTS = {
    "GPU hit": "gpu_hit_tokens",
    "CPU hit": "cpu_hit_tokens",
    "disk hit": "disk_hit_tokens",
    "recomputed": "recomputed_tokens",
    "new": "new_tokens",
}
_COLUMNS = ("session", "turn", "phase", "status", *PARTS.values())

Turns = Sequence[Mapping[str, Any]]
"""The completed measured turns of one conversation, in order; the columns of PARTS and `turn`."""


def conversations(store: ResultsStore, job: JobResult) -> dict[str, Turns]:
    """By session, those whose turns were all completed."""
    assert job.trial is not None
    found: dict[str, list[Mapping[str, Any]]] = {}
    broken = set()
    for row in store.turns_of(job.trial.id, *_COLUMNS):
        if is_measured(row.phase):
            found.setdefault(row.session, []).append(dict(row._mapping))
            if row.status != "completed":
                broken.add(row.session)
    return {name: sorted(turns, key=lambda t: t["turn"]) for name, turns in found.items() if name not in broken}


def telling(talks: Mapping[str, Turns]) -> str:
    """The conversation that shows most: whose least part of GPU hit, CPU hit and recomputed tokens is the largest."""

    def least(name: str) -> tuple[int, str]:
        sums = [sum(turn[PARTS[part]] for turn in talks[name]) for part in ("GPU hit", "CPU hit", "recomputed")]
        return min(sums), name

    return max(talks, key=least)


def draw(store: ResultsStore, sweep_id: int, path: Path) -> list[Path]:
    """Write the picture and its PDF. Raises MissingSeries where the sweep lacks one of SHOWN."""
    jobs: dict[str, JobResult] = {}
    for job in store.trials_of_sweep(sweep_id):
        if job.trial is not None:
            jobs.setdefault(job.trial.baseline, job)
    missing = [name for name in SHOWN if name not in jobs]
    if missing:
        raise MissingSeries(f"Sweep {sweep_id} has no completed trial of {missing[0]}; run `{COMMAND}`.")
    talks = {name: conversations(store, jobs[name]) for name in SHOWN}
    both = {name: turns for name, turns in talks["pensieve"].items() if name in talks["stateless"]}
    if not both:
        raise MissingSeries(f"No conversation of sweep {sweep_id} was completed under both; run `{COMMAND}`.")
    session = telling(both)
    shown = [part for part in PARTS if part != "disk hit" or any(turn[PARTS[part]] for turn in both[session])]
    figure, grid = style.new_grid(2.6, rows=2, sharex=True, sharey=True)
    for [axes], name in zip(grid, SHOWN, strict=True):
        turns = talks[name][session]
        bottom = [0] * len(turns)
        for part in shown:
            heights = [turn[PARTS[part]] or 0 for turn in turns]
            axes.bar(
                [turn["turn"] for turn in turns], heights, bottom=bottom, color=style.PARTS[part],
                edgecolor=style.EDGE, linewidth=0.4, label=part,
                gid=f"{name}/{part}",
            )  # fmt: skip
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
        axes.set_title(name)
        axes.set_ylabel("prompt tokens")
    grid[-1][0].set_xlabel("turn of the conversation")
    grid[-1][0].set_xticks([turn["turn"] for turn in talks["pensieve"][session]])
    style.legend(figure, style.parts_key(shown))
    trial, other = (jobs[name].trial for name in SHOWN)
    assert trial is not None and other is not None
    title = "Where a conversation's tokens are when its next message comes"
    where = f"{trial.model} on {trial.hardware}{', simulated' if trial.simulated else ''}"
    note = (
        f"Conversation {session!r} of sweep {sweep_id}, trials {trial.id} and {other.id}, from table turn: the one that "
        "meets most of GPU hits, CPU hits and recomputation, not a typical one."
    )
    style.compose(figure, title, f"One conversation, {where}; the same messages under both", "", note)
    return style.save(figure, path.with_suffix(""), title, note)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", type=int, help="default: the latest")
    parser.add_argument("--to", type=Path, help="default: idea.png in the figures of the outputs folder")
    options = parser.parse_args()
    outputs = style.outputs_folder()
    try:
        store = open_store(outputs, create=False)
        latest = store.latest_sweep()
        sweep = options.sweep or (latest.id if latest else None)
        if sweep is None:
            raise MissingSeries(f"There is no sweep yet; run `{COMMAND}`.")
        for path in draw(store, sweep, options.to or outputs / "figures" / "idea.png"):
            print(path)
    except PensieveError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
