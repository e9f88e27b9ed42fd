"""What a miss leaves behind: warm-up, query and re-warm-up by cached and recomputed: python analysis/cascade.py [--sweep ID]

A miss [B, Q] replaces the warmed [A, B]; the re-warm-up [A, B] shows what that cost the next request.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any folder, installed or not

from analysis.drawing import command_line, style
from analysis.drawing.bars import LABEL_SIZE, ROW_IN
from analysis.drawing.command_line import Figure
from analysis.drawing.invalidation import COMMAND, Step, applies, mean_tokens, named, steps_of, ttft
from analysis.drawing.publish import Drawing, Row, arrange, publish
from analysis.drawing.source import Panel, Source

NAME = "cascade"
TITLE = "What a miss leaves behind"
LEAD = (
    "Mean prompt tokens of a conversation with a miss, by what the engine did with them, and the median time to first "
    "token; below them the re-warm-up of the conversations with a hit"
)
PARTS = {"cached": "GPU hit", "recomputed": "recomputed", "new": "new"}
STAGES = {
    "warm-up [A, B]": "warmup",
    "miss [B, Q]": "miss",
    "re-warm-up [A, B]": "rewarm_miss",
    "the same after a hit": "rewarm_hit",
}


def draw(source: Source, folder: Path) -> list[Drawing]:
    """A picture for each split of the prefix."""
    return [_draw(source, panel, folder) for panel in source.panels()]


def _draw(source: Source, panel: Panel, folder: Path) -> Drawing:
    rows: list[Row] = []
    height = 1.6 + len(panel.cells) * (len(STAGES) + 1.25) * ROW_IN
    figure, axes = style.new_figure(height_in=height)
    names, at = [], 0.0
    longest, texts = 0.0, []
    for cell in panel.cells:
        steps = steps_of(source, cell)
        axes.annotate(
            cell.baseline, (0, at + 0.55), xycoords=("axes fraction", "data"), xytext=(2, 0), va="center",
            textcoords="offset points", fontsize=7, fontweight="bold", color=style.colour(cell.baseline),
        )  # fmt: skip
        at += 1.05
        for label, name in STAGES.items():
            own = _of_misses(steps, name)
            parts, time = mean_tokens(own), ttft(own)
            end = 0.0
            for part, colour in PARTS.items() if parts else ():
                [patch] = axes.barh(
                    at + 0.5, parts[part], left=end, height=0.84, facecolor=style.PARTS[colour], edgecolor="#7F7F7F",
                    linewidth=0.4,
                )  # fmt: skip
                patch.set_gid(f"{cell.baseline}/{name}/{part}")
                end += parts[part]
            texts.append((end, at + 0.5, f"{time.value:,.1f} ms" if parts else f"not reported; {time.value:,.1f} ms"))
            names.append((at + 0.5, label))
            longest = max(longest, end)
            at += 1.0
            rows.append(
                {
                    "baseline": cell.baseline,
                    "step": name,
                    **{f"{part}_tokens": None if parts is None else parts[part] for part in PARTS},
                    "ttft_ms_median": time.value,
                    "ci_low": time.ci_low,
                    "ci_high": time.ci_high,
                    "n": time.n,
                    "n_seeds": time.groups,
                    "trials": cell.ids,
                }
            )
        at += 0.2
    axes.set_ylim(at, 0)
    axes.set_xlim(0, max(longest, 1.0) * 1.34)
    axes.set_yticks([y for y, _ in names], [label for _, label in names], fontsize=LABEL_SIZE)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    for end, y, text in texts:
        axes.annotate(
            text, (end, y), xytext=(2.5, 0), textcoords="offset points", fontsize=LABEL_SIZE, va="center_baseline"
        )
    axes.set_xlabel("prompt tokens")
    handles = [
        axes.barh(0, 0, color=style.PARTS[colour], edgecolor="#7F7F7F", linewidth=0.4) for colour in PARTS.values()
    ]
    arrange(figure, panel, TITLE, LEAD, left=1.13, right=0.08)
    axes.legend(
        handles, list(PARTS), loc="lower right", bbox_to_anchor=(1.01, 1.0), ncols=3, frameon=False, handlelength=0.9,
        columnspacing=0.9, handletextpad=0.4, borderaxespad=0.0, borderpad=0.1, fontsize=6.5,
    )  # fmt: skip
    return publish(figure, panel, NAME, TITLE, LEAD, rows, folder)


def _of_misses(steps: Sequence[Step], name: str) -> list[Step]:
    """The steps called `name`; of the warm-ups only those that a miss followed."""
    missed = {step.key for step in named(steps, "miss")}
    return [step for step in named(steps, name) if name != "warmup" or step.key in missed]


FIGURE = Figure(NAME, "what a miss leaves behind: cached and recomputed tokens, step by step", COMMAND, applies, draw)


def main(argv: Sequence[str] | None = None) -> int:
    return command_line.main(FIGURE, argv)


if __name__ == "__main__":
    sys.exit(main())
