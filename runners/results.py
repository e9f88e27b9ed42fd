"""What was recorded: list, show, export, reproduce, bundle it, or rebuild MLflow from it.

eval "$(python runners/results.py -sc install=bash)" completes it on TAB, and run.py too.
"""

import sys
from pathlib import Path

# This folder's profile.py is not the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from pensieve.cli import results  # noqa: E402

if __name__ == "__main__":
    sys.exit(results())
