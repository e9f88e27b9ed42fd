"""How much KV cache a load needs, as a map of sizes: python runners/size.py [group=option] [slo.ttft_ms=500]"""

import sys
from pathlib import Path

# This folder's profile.py is not the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from pensieve.cli import size  # noqa: E402

if __name__ == "__main__":
    sys.exit(size())
