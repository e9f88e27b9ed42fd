"""A server with the API of OpenAI: python runners/serve.py [group=option] [serve.port=8000]. --help lists all fields."""

import sys
from pathlib import Path

# This folder's profile.py is not the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from pensieve.cli import serve  # noqa: E402

if __name__ == "__main__":
    sys.exit(serve())
