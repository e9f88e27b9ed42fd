"""How much KV cache a load needs, as a map of sizes: python runners/size.py [group=option] [slo.ttft_ms=500]"""

import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
if (CHECKOUT / "pensieve").is_dir():
    sys.path.insert(0, str(CHECKOUT))  # runs from any folder, installed or not

from pensieve.cli import size  # noqa: E402

if __name__ == "__main__":
    sys.exit(size())
