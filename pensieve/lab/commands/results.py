"""pensieve results and compare: what was recorded. A command of results is a function that returns its lines, or its exit
status."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

from pensieve.errors import ResultsError
from pensieve.lab.compose.conf import outputs_folder
from pensieve.lab.metrics import Slo
from pensieve.lab.results import export
from pensieve.lab.results.compare_trials import compare_trials, objective_of, select_trials
from pensieve.lab.results.store import ResultsStore, open_store
from pensieve.lab.trial.terminal import console

MAIN_METRICS = (
    "ttft_ms_mean",
    "ttft_ms_p99",
    "tpot_ms_mean",
    "normalized_latency_ms_mean",
    "throughput_*",
    "*hit_rate",
    "miss_rate",
)
COMPARE_EPILOG = """A and B: a sweep's id, "latest", or conditions such as sweep=latest,baseline=pensieve or
model=tiny,workload.users=6 (columns of table trial, or dotted fields of the configuration).
Example: python runners/compare.py sweep=latest,baseline=pensieve sweep=latest,baseline=stateless
Latencies are paired by seed and conversation. Everything else is paired by seed: one value a trial, and an
interval from five seeds on. "A / B" is the geometric mean of the pairs' ratios."""


def results(argv: Sequence[str] | None, description: str | None) -> int:
    """Raises PensieveError."""
    options = _parser(description).parse_args(argv)
    store = opened(options.url_env)
    store.interrupt_dead()  # what was killed could not record its end
    found: int | Iterable[str] = options.run(store, options)
    if isinstance(found, int):
        return found
    for line in found:
        print(line)
    sys.stdout.flush()
    return 0


def opened(url_env: str | None) -> ResultsStore:
    """The database that the environment variable names; None: outputs/results.db. Raises ResultsError where there is none."""
    url = os.environ.get(url_env) if url_env else None
    if url_env and not url:
        raise ResultsError(f"The environment variable {url_env} is not set; export it with the database's URL.")
    return open_store(outputs_folder(), url, create=False)


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--url-env", help="environment variable that holds the URL of another results database")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[..., int | Iterable[str]], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        return added

    listed = command("list", _list, "sweeps and the newest trials, a line each")
    listed.add_argument("--sweep", type=int, help="only trials of this sweep")
    listed.add_argument("--status", choices=("running", "completed", "failed", "interrupted"), help="only such trials")
    listed.add_argument("--limit", type=int, default=50, metavar="N", help="at most so many (default: 50; 0: all)")
    shown = command("show", lambda store, asked: export.show_trial(store, asked.trial), "all that is known of a trial")
    shown.add_argument("trial", type=int)
    read = command("read", _read, "a conversation of a trial as text, with where each turn's history came from")
    read.add_argument("trial", help="its number; latest shows the latest sweep's, beside stateless serving")
    read.add_argument("--session", help="its name (default: the first measured one)")
    noted = command("notes", _notes, "what a sweep found, comparison by comparison, and what qualifies its numbers")
    noted.add_argument("sweep", nargs="?", default="latest", help="its id, or latest (default)")
    exported = command("export", _export, "a JSON for each baseline of a sweep, and its turns as CSV")
    exported.add_argument("sweep", nargs="?", default="latest", help="its id (default: the latest)")
    exported.add_argument("--to", type=Path, help="folder (default: outputs/export/sweep-<id>)")
    command("sync-mlflow", _to_mlflow, "write to MLflow what it lacks of the results database (pensieve mlflow sync)")
    return parser


def _list(store: ResultsStore, asked: argparse.Namespace) -> Iterator[str]:
    limit = asked.limit if asked.limit > 0 else None
    if asked.sweep is not None:
        store.sweep(asked.sweep)  # says where there is none
    elif asked.status is None:
        yield from [*export.list_sweeps(store, limit), ""]
    yield from export.list_trials(store, asked.sweep, asked.status, limit)


def _read(store: ResultsStore, asked: argparse.Namespace) -> int:
    from pensieve.lab.commands.read import beside, conversation_of, side_by_side

    if asked.trial == "latest":
        sweep = store.sweep_named(asked.trial)
        jobs = (job.trial for job in store.trials_of_sweep(sweep.id) if job.trial is not None)
        trials = beside(store, sweep) or tuple(jobs)[:1]
    elif asked.trial.isdecimal():
        trials = (store.trial(int(asked.trial)),)
    else:
        raise ResultsError(
            f"{asked.trial!r} is no trial; give a number (runners/results.py list shows them), or latest."
        )
    said, session = {}, asked.session
    for trial in trials:
        session, said[f"{trial.baseline}, trial {trial.id}"] = conversation_of(store, trial.id, session)
    console().print(f"Conversation {session}", side_by_side(said), sep="\n")
    return 0


def _notes(store: ResultsStore, asked: argparse.Namespace) -> int:
    from pensieve.lab.results.sweep_table import sweep_table

    console().print(sweep_table(store, store.sweep_named(asked.sweep).id).particulars)
    return 0


def _export(store: ResultsStore, asked: argparse.Namespace) -> Iterable[str]:
    sweep_id = store.sweep_named(asked.sweep).id
    return map(str, export.export_sweep(store, sweep_id, asked.to or outputs_folder() / "export" / f"sweep-{sweep_id}"))


def _to_mlflow(store: ResultsStore, _: argparse.Namespace) -> Iterable[str]:
    from pensieve.lab.results.mlflow_runs import sync_mlflow

    return [f"{sync_mlflow(outputs_folder(), store)} trials were written to MLflow from {store.database.shown}."]


def compare(argv: Sequence[str] | None, description: str | None) -> int:
    """Raises PensieveError."""
    parser = argparse.ArgumentParser(
        description=description, epilog=COMPARE_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("a", metavar="A")
    parser.add_argument("b", metavar="B")
    parser.add_argument(
        "--metrics", default=",".join(MAIN_METRICS), help="names, * allowed, comma between (default: the main ones)"
    )
    parser.add_argument("--all", action="store_true", help="every metric that both have")
    parser.add_argument(
        "--allow-mixed",
        action="store_true",
        help="compare trials of several kinds (simulated and real, contended, other weights or code); it says so",
    )
    for name, what in (("ttft", "the first token"), ("tpot", "each further token")):
        parser.add_argument(
            f"--slo-{name}-ms", type=float, help=f"the limit that goodput goes by: {what} (default: the sweep's)"
        )
    parser.add_argument("--url-env", help="environment variable with the database's URL (default: outputs/results.db)")
    options = parser.parse_args(argv)
    wanted = ["*"] if options.all else [name.strip() for name in options.metrics.split(",")]
    store = opened(options.url_env)
    words = (options.a, options.b)
    a, b = (select_trials(store, one) for one in words)
    asked = Slo(options.slo_ttft_ms, options.slo_tpot_ms)
    slo = asked if asked != Slo() else objective_of(store, *words)
    found = compare_trials(store, a, b, options.allow_mixed, slo)
    console().print(found.table(lambda name: any(fnmatch(name, pattern) for pattern in wanted)))
    return 0
