"""Talk to a model in the terminal: python runners/chat.py [group=option] [chat.script=FILE]. --help lists all fields."""

import sys
from pathlib import Path

# This folder's profile.py is not the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from pensieve.cli import chat  # noqa: E402

if __name__ == "__main__":
    sys.exit(chat())
