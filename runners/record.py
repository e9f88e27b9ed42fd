"""A proxy that records a server's traffic: python runners/record.py --upstream http://host:8000 --out FILE"""

import sys
from pathlib import Path

# This folder's profile.py is not the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from pensieve.cli import record  # noqa: E402

if __name__ == "__main__":
    sys.exit(record())
