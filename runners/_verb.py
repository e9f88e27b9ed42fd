"""Calls the verb of pensieve/cli.py that a file of this folder is named for."""

import sys
from pathlib import Path

# In place of this folder, whose profile.py is not the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from pensieve import cli  # noqa: E402


def call(runner: str) -> None:
    sys.exit(getattr(cli, Path(runner).stem)())
