"""Benchmarks beside their limits and peers: python runners/bench.py target=all. --help lists all."""

import sys
from pathlib import Path

sys.path[0] = str(
    Path(__file__).resolve().parents[1]
)  # for this folder, whose profile.py is not the standard library's

from pensieve.cli import bench  # noqa: E402

if __name__ == "__main__":
    sys.exit(bench())
