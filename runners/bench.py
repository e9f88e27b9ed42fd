"""Benchmarks beside their limits and peers: python runners/bench.py target=all. --help lists all."""

import sys
from pathlib import Path

# This folder's profile.py is not the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from pensieve.cli import bench  # noqa: E402

if __name__ == "__main__":
    sys.exit(bench())
