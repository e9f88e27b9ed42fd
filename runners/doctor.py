"""What this machine has, which models fit on it, and what to type next: python runners/doctor.py"""

import argparse
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
if (CHECKOUT / "pensieve").is_dir():
    sys.path.insert(0, str(CHECKOUT))

try:
    from pensieve.trial.doctor import report
except ModuleNotFoundError as error:
    sys.exit(f"The Python package {error.name} is not installed; install it (README.md, make install) and run again.")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cache", default="small", help="the cache option that fitting is judged with (default: small)"
    )
    arguments = parser.parse_args()
    sys.exit(report(arguments.cache))
