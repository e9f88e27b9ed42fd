"""What recorded traffic lost in the cache, and what would help: python runners/advise.py FILE [group=option]"""

import sys
from pathlib import Path

# This folder's profile.py is not the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from pensieve.cli import advise  # noqa: E402

if __name__ == "__main__":
    sys.exit(advise())
