"""Two sweeps, or two sets of trials, metric by metric: python runners/compare.py A B. --help says how to name them."""

import argparse
import os
import sys
from fnmatch import fnmatch
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
if (CHECKOUT / "pensieve").is_dir():
    sys.path.insert(0, str(CHECKOUT))

try:
    from pensieve.compose import outputs_folder
    from pensieve.errors import PensieveError
    from pensieve.results.compare_trials import compare_trials, select_trials
    from pensieve.results.store import open_store
    from pensieve.trial.terminal import console
except ModuleNotFoundError as error:
    sys.exit(f"The Python package {error.name} is not installed; install it (README.md, make install) and run again.")

MAIN = (
    "ttft_ms_mean",
    "ttft_ms_p99",
    "tpot_ms_mean",
    "normalized_latency_ms_mean",
    "throughput_*",
    "*hit_rate",
    "miss_rate",
)
EPILOG = """A and B: a sweep's id, "latest", or conditions such as sweep=latest,baseline=pensieve or
model=tiny,workload.users=6 (columns of table trial, or dotted fields of the configuration).
Example: python runners/compare.py sweep=latest,baseline=pensieve sweep=latest,baseline=stateless
The ratio is A / B. Latencies are paired by seed and conversation; everything else has one value a trial,
and an interval from five seeds on."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("a", metavar="A")
    parser.add_argument("b", metavar="B")
    parser.add_argument(
        "--metrics", default=",".join(MAIN), help="names, * allowed, comma between (default: the main ones)"
    )
    parser.add_argument("--all", action="store_true", help="every metric that both have")
    parser.add_argument(
        "--allow-mixed",
        action="store_true",
        help="compare simulated with real, contended, profiled, differently weighted or differently coded trials; it says so",
    )
    parser.add_argument("--url-env", help="environment variable with the database's URL (default: outputs/results.db)")
    options = parser.parse_args()
    wanted = ["*"] if options.all else [name.strip() for name in options.metrics.split(",")]
    try:
        url = os.environ.get(options.url_env) if options.url_env else None
        if options.url_env and not url:
            parser.error(f"{options.url_env} is not set; export it with the database's URL")
        store = open_store(outputs_folder(), url, create=False)
        a, b = select_trials(store, options.a), select_trials(store, options.b)
        found = compare_trials(store, a, b, options.allow_mixed)
    except PensieveError as error:
        print(error, file=sys.stderr)
        return 1
    console().print(found.table(lambda name: any(fnmatch(name, pattern) for pattern in wanted)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
