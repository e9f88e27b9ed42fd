"""Two sweeps, or two sets of trials, metric by metric: python runners/compare.py A B. --help says how to name them."""

import sys
from pathlib import Path

# This folder's profile.py is not the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from pensieve.cli import compare  # noqa: E402

if __name__ == "__main__":
    sys.exit(compare())
