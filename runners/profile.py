"""Measure this machine, for its cost model and to simulate it: python runners/profile.py [group=option] [profile.to=FILE]"""

import sys
from pathlib import Path

# This folder's profile.py is not the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from pensieve.cli import profile  # noqa: E402

if __name__ == "__main__":
    sys.exit(profile())
