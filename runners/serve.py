"""A server with the API of OpenAI: python runners/serve.py [group=option] [serve.port=8000]. --help lists all fields."""

import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
if (CHECKOUT / "pensieve").is_dir():
    sys.path[0] = str(CHECKOUT)  # for this folder, whose profile.py is not the standard library's

from pensieve.cli import serve  # noqa: E402

if __name__ == "__main__":
    sys.exit(serve())
