"""The idea as one picture: where the tokens of one conversation are at each of its turns, kept and forgotten.

    python runners/run.py -m hardware=sim_a100_80g model=llama3_8b cache=small seed=0 baseline=pensieve,stateless
    python analysis/idea.py [--sweep N] [--to docs/idea.png]

Each bar is the prompt of one turn, from its row of table `turn`: what was found on the GPU, what came back from CPU memory
or disk, what was computed again, and what is new.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

from analysis import style
from analysis.bars import Bars, Side
from analysis.figures import chosen_store, guarded, source_options
from analysis.sweep import Source, open_source
from pensieve.core.request import is_measured
from pensieve.errors import MissingSeries
from pensieve.lab.compose.folder import outputs_folder
from pensieve.lab.results.schema import Trial
from pensieve.lab.results.store import ResultsStore

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


def conversations(source: Source, trial: Trial) -> dict[str, pd.DataFrame]:
    """By session, the measured turns of those whose turns were all completed: a column a part, indexed by turn."""
    turns = source.turns_of(trial, measured=False)
    turns = turns[turns["phase"].map(is_measured).astype(bool)]
    whole = turns.groupby(level="session").filter(lambda own: bool((own["status"] == "completed").all()))
    parts = whole.reset_index().set_index("turn")[["session", *PARTS.values()]].fillna(0).sort_index()
    return {str(name): own for name, own in parts.groupby("session")}


def telling(talks: dict[str, pd.DataFrame]) -> str:
    """The conversation that shows most: whose least part of GPU hit, CPU hit and recomputed tokens is the largest."""
    three = [PARTS[part] for part in ("GPU hit", "CPU hit", "recomputed")]
    return max(talks, key=lambda name: (talks[name][three].sum().min(), name))


def draw(store: ResultsStore, sweep_id: int | None, path: Path) -> list[Path]:
    """Write the picture and its PDF. Raises MissingSeries where the sweep lacks one of SHOWN."""
    source = open_source(store, sweep_id)
    trials = {name: next((one for one in source.trials if one.baseline == name), None) for name in SHOWN}
    talks = {}
    for name, trial in trials.items():
        if trial is None:
            raise MissingSeries(f"Sweep {source.sweep.id} has no completed trial of {name}; run `{COMMAND}`.")
        talks[name] = conversations(source, trial)
    both = {name: turns for name, turns in talks["pensieve"].items() if name in talks["stateless"]}
    if not both:
        raise MissingSeries(f"No conversation of sweep {source.sweep.id} was completed under both; run `{COMMAND}`.")
    session = telling(both)
    rows = [
        {
            "baseline": name,
            **{column: float(one[column]) for column in PARTS.values()},
            "_section": name,
            "_name": f"turn {turn}",
        }
        for name in SHOWN
        for turn, one in talks[name][session].iterrows()
    ]
    shown = {part: column for part, column in PARTS.items() if any(row[column] for row in rows) or part != "disk hit"}
    figure = Bars(lead="", sides=[Side(says="prompt tokens", parts=shown)]).drawn(rows)
    trial, other = (trials[name] for name in SHOWN)
    assert trial is not None and other is not None
    title = "Where a conversation's tokens are when its next message comes"
    where = f"{trial.model} on {trial.hardware}{', simulated' if trial.simulated else ''}"
    note = (
        f"Conversation {session!r} of sweep {source.sweep.id}, trials {trial.id} and {other.id}, from table turn: the one "
        "that meets most of GPU hits, CPU hits and recomputation, not a typical one."
    )
    style.compose(figure, title, f"One conversation, {where}; the same messages under both", "", note)
    return style.save(figure, path.with_suffix(""), title, note)


def main() -> int:
    parser = source_options(__doc__ or "")
    parser.add_argument("--to", type=Path, help="default: idea.png in the figures of the outputs folder")
    options = parser.parse_args()

    def drawn() -> None:
        path = options.to or outputs_folder() / "figures" / "idea.png"
        print(*draw(chosen_store(options), options.sweep, path), sep="\n")

    return guarded(options, drawn)


if __name__ == "__main__":
    sys.exit(main())
