"""A server with the API of OpenAI: python runners/serve.py [group=option] [serve.port=8000]. --help lists all fields."""

import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
if (CHECKOUT / "pensieve").is_dir():
    sys.path.insert(0, str(CHECKOUT))  # runs from any folder, installed or not

from pensieve.cli import serve  # noqa: E402

if __name__ == "__main__":
    sys.exit(serve())
