"""One trial, or with -m a sweep: python runners/run.py [group=option] [group.field=value] [-m]. --help lists them all."""

import sys
from pathlib import Path

# This folder's profile.py is not the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from pensieve.cli import run  # noqa: E402

if __name__ == "__main__":
    sys.exit(run())
