"""What was recorded: list, show, export, reproduce, prune, bundle it, or rebuild MLflow from it."""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
if (CHECKOUT / "pensieve").is_dir():
    sys.path.insert(0, str(CHECKOUT))
sys.path.insert(0, os.getcwd())  # reproduce: a policy of one's own in the current folder

try:
    from pensieve.compose.folder import outputs_folder
    from pensieve.errors import PensieveError, ResultsError
    from pensieve.results.store import ResultsStore, open_store
    from pensieve.units import format_bytes
except ModuleNotFoundError as error:
    sys.exit(f"The Python package {error.name} is not installed; install it (README.md, make install) and run again.")


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        result: int = options.run(_open(options.url_env), options)
        return result
    except PensieveError as error:
        _say(str(error))
    except BrokenPipeError:  # somebody read enough: `... list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        _say("Interrupted.")
        return 130
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url-env", help="environment variable that holds the URL of another results database")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[..., int], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        return added

    listed = command("list", _list, "sweeps and the newest trials, a line each")
    listed.add_argument("--sweep", type=int, help="only trials of this sweep")
    listed.add_argument("--status", choices=("running", "completed", "failed", "interrupted"), help="only such trials")
    listed.add_argument("--limit", type=int, default=50, help="at most so many trials (default: 50; 0: all)")
    shown = command("show", _show, "all that is known of a trial")
    shown.add_argument("trial", type=int)
    exported = command("export", _export, "a JSON for each baseline of a sweep, and its turns as CSV and Parquet")
    exported.add_argument("--sweep", type=int, help="default: the latest")
    exported.add_argument("--to", type=Path, help="folder (default: outputs/export/sweep-<id>)")
    repeated = command("reproduce", _reproduce, "run a trial again from its stored configuration and compare")
    repeated.add_argument("trial", type=int)
    pruned = command("prune", _prune, "delete attempts that no sweep shows; without --yes only say which")
    pruned.add_argument("--failed", action="store_true", help="also failed and interrupted trials that never completed")
    pruned.add_argument("--yes", action="store_true", help="delete them")
    command("rebuild-mlflow", _rebuild, "make the MLflow store anew from the results database")
    bundled = command("bundle", _bundle, "a zip of a sweep that redraws its figures on another machine")
    bundled.add_argument("sweep", type=int)
    bundled.add_argument("--to", type=Path, help="file (default: outputs/bundle/sweep-<id>.zip)")
    return parser


def _open(url_env: str | None) -> ResultsStore:
    url = None
    if url_env:
        url = os.environ.get(url_env)
        if not url:
            raise ResultsError(f"The environment variable {url_env} is not set; export it with the database's URL.")
    return open_store(outputs_folder(), url, create=False)


def _list(store: ResultsStore, options: argparse.Namespace) -> int:
    from pensieve.results.listing import list_sweeps, list_trials

    limit = options.limit or None
    if options.sweep is None and options.status is None:
        _print([*list_sweeps(store, limit), ""])
    _print(list_trials(store, options.sweep, options.status, limit))
    return 0


def _show(store: ResultsStore, options: argparse.Namespace) -> int:
    from pensieve.results.listing import show_trial

    _print(show_trial(store, options.trial))
    return 0


def _export(store: ResultsStore, options: argparse.Namespace) -> int:
    from pensieve.results.export import export_sweep

    sweep_id = options.sweep
    if sweep_id is None:
        latest = store.latest_sweep()
        if latest is None:
            raise ResultsError("There is no sweep to export yet; run `python runners/run.py -m` first.")
        sweep_id = latest.id
    folder = options.to or outputs_folder() / "export" / f"sweep-{sweep_id}"
    _print(map(str, export_sweep(store, sweep_id, folder)))
    return 0


def _reproduce(store: ResultsStore, options: argparse.Namespace) -> int:
    from pensieve.trial.reproduce import reproduce

    return reproduce(store, options.trial, _say)


def _prune(store: ResultsStore, options: argparse.Namespace) -> int:
    from pensieve.results.prune import prunable, prune

    chosen = prunable(store, options.failed)
    for one in chosen:
        why = f"replaced by trial {one.successor}" if one.successor else "never completed"
        print(f"trial {one.trial_id} ({one.status}, {why})")
    size = format_bytes(sum(path.stat().st_size for one in chosen for path in one.files))
    if not chosen:
        print("There is nothing to prune.")
    elif not options.yes:
        print(f"{len(chosen)} attempts and {size} of files would go; add --yes to delete them.")
    else:
        prune(store, chosen)
        print(f"{len(chosen)} attempts and {size} of files are gone.")
    return 0


def _rebuild(store: ResultsStore, _options: argparse.Namespace) -> int:
    from pensieve.results.mlflow_runs import rebuild_mlflow

    made = rebuild_mlflow(outputs_folder(), store, _say)
    print(f"{made} MLflow runs were made from {store.database.shown}.")
    return 0


def _bundle(store: ResultsStore, options: argparse.Namespace) -> int:
    from pensieve.results.bundle import bundle_sweep

    path = options.to or outputs_folder() / "bundle" / f"sweep-{options.sweep}.zip"
    print(bundle_sweep(store, options.sweep, CHECKOUT, path))
    return 0


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
