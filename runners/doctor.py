"""What this machine has, which models fit on it, and what to type next: python runners/doctor.py"""

import sys
from pathlib import Path

# This folder's profile.py is not the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from pensieve.cli import doctor  # noqa: E402

if __name__ == "__main__":
    sys.exit(doctor())
