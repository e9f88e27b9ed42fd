"""Where in the outputs folder what is drawn of a sweep lies."""

from __future__ import annotations

from pathlib import Path

LATEST = "latest"  # beside the folders of the sweeps, a link to the one that was drawn last


def figures_folder(outputs: Path, sweep_id: int) -> Path:
    return outputs / "figures" / f"sweep-{sweep_id}"


def report_file(outputs: Path, sweep_id: int) -> Path:
    return outputs / "reports" / f"sweep-{sweep_id}.html"
