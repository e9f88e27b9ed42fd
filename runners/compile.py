"""Compile the modules in which simulated trials spend their time, once for this machine: python runners/compile.py"""

import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
if (CHECKOUT / "pensieve").is_dir():
    sys.path[0] = str(CHECKOUT)  # for this folder, whose profile.py is not the standard library's

from pensieve.cli import compile  # noqa: E402

if __name__ == "__main__":
    sys.exit(compile())
