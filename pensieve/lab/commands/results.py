"""pensieve results and compare: what was recorded. A command of results is a function that returns its lines, or its exit
status."""

import argparse
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from pensieve.errors import ResultsError
from pensieve.lab.compose.build import make_workload
from pensieve.lab.compose.conf import outputs_folder
from pensieve.lab.compose.model_files import build_tokenizer
from pensieve.lab.compose.plan import plan_trial
from pensieve.lab.compose.settings import check
from pensieve.lab.metrics import Slo
from pensieve.lab.results import export
from pensieve.lab.results.compare_trials import compare_trials, objective_of, select_trials
from pensieve.lab.results.frame import OURS, REFERENCE, Frame
from pensieve.lab.results.schema import Sweep, Trial
from pensieve.lab.results.store import ResultsStore, recorded_store
from pensieve.lab.results.tokens import read_tokens
from pensieve.lab.trial.terminal import console
from pensieve.serve.record import TurnRecord, is_measured
from pensieve.units import three_digits

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
    store = recorded_store(outputs_folder(), options.url_env)
    store.interrupt_dead()  # what was killed could not record its end
    found: int | Iterable[str] = options.run(store, options)
    if isinstance(found, int):
        return found
    for line in found:
        print(line)
    sys.stdout.flush()
    return 0


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


# -- results read: a conversation is built again from its workload and the tokens that the trial kept ------------------------

_OF_RECORD = ("session", "turn", "phase", "label", "iteration", "status", "finish_reason", "finished_s")
_SOURCES = {
    "gpu_hit_tokens": "GPU",
    "cpu_hit_tokens": "CPU",
    "disk_hit_tokens": "disk",
    "recomputed_tokens": "recomputed",
}
"""Where the history of a turn came from."""


@dataclass(frozen=True, slots=True)
class SaidTurn:
    """One turn as text. row: of the database. token_ids: the reply's."""

    row: Any
    message: str
    reply: str
    token_ids: tuple[int, ...] = ()


def conversation_of(store: ResultsStore, trial_id: int, session: str | None = None) -> tuple[str, Sequence[SaidTurn]]:
    """A conversation's name and its completed turns; without a session, the first measured one.

    Raises ResultsError where there is no such trial or conversation, or its tokens were not kept; ConfigError where its
    configuration is no longer understood.
    """
    trial = store.trial(trial_id)
    kept = store.artifacts_of(trial_id, "tokens")
    if not kept:
        raise ResultsError(f"The tokens of trial {trial_id} were not kept, so its conversations cannot be read.")
    tokens = read_tokens(kept[0].path)
    columns = (*_OF_RECORD, "ttft_ms", *_SOURCES)
    rows = {(row.session, row.turn): row for row in store.turns_of(trial_id, *columns) if row.status == "completed"}
    chosen = session or next((row.session for row in rows.values() if is_measured(row.phase)), None)
    if chosen is None or chosen not in {name for name, _ in rows}:
        known = ", ".join(dict.fromkeys(name for name, _ in rows)) or "none"
        raise ResultsError(f"Trial {trial_id} has no conversation {chosen!r} with completed turns; it has: {known}.")
    plan = plan_trial(check(trial.config))
    tokenizer = build_tokenizer(plan.config.model, plan.model.vocab, plan.device.simulated)
    workload = make_workload(plan, tokenizer)
    waiting, said = list(workload.start()), []
    while waiting:
        request = waiting.pop(0).due()
        key = request.session, request.turn
        if key not in rows:
            continue
        reply = tuple(int(one) for one in tokens[key].token_ids) if key in tokens else ()
        if request.session == chosen:
            message = tokenizer.decode(list(request.prompt))
            said.append(SaidTurn(rows[key], message, tokenizer.decode(list(reply)), reply))
        record = TurnRecord(**{name: getattr(rows[key], name) for name in _OF_RECORD}, token_ids=array("i", reply))
        waiting += workload.on_finished(record)
    return chosen, sorted(said, key=lambda one: int(one.row.turn))


def beside(store: ResultsStore, sweep: Sweep) -> tuple[Trial, Trial] | None:
    """Two trials of one setting, seed and repeat that served the same conversations: Pensieve's, and the reference's. None
    where the sweep has no such pair."""
    for group in Frame(store, sweep.id).panels():
        others = {(trial.seed, trial.repeat): trial for trial in group.trials.get(REFERENCE, ())}
        for ours in group.trials.get(OURS, ()):
            if (ours.seed, ours.repeat) in others:
                return ours, others[ours.seed, ours.repeat]
    return None


def side_by_side(said: Mapping[str, Sequence[SaidTurn]]) -> Table:
    """One conversation as one or two baselines served it, a column each: the message, then the reply under its TTFT and where
    its history came from. Of two the title counts the replies that are equal, token for token."""
    turns = list(zip(*said.values(), strict=False))
    equal = sum(len({one.token_ids for one in turn}) == 1 for turn in turns)
    title = f"{equal} of {len(turns)} replies equal, token for token" if len(said) > 1 else None
    table = Table(title=title, title_justify="left", box=box.SIMPLE, expand=True)
    for name in said:
        table.add_column(name, ratio=1)
    for turn in turns:
        table.add_row(*(Text(f"> {one.message.strip()}", style="dim") for one in turn))
        table.add_row(*(Text(f"[{_served(one.row)}] {one.reply.strip()}\n") for one in turn))
    return table


def _served(row: Any) -> str:
    tokens = [f"{getattr(row, name):,} {where}" for name, where in _SOURCES.items() if getattr(row, name)]
    return f"turn {row.turn}, TTFT {three_digits(row.ttft_ms)} ms; history: {', '.join(tokens) or 'none'}"


# -- compare ------------------------------------------------------------------------------------------------------------


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
    store = recorded_store(outputs_folder(), options.url_env)
    words = (options.a, options.b)
    a, b = (select_trials(store, one) for one in words)
    asked = Slo(options.slo_ttft_ms, options.slo_tpot_ms)
    slo = asked if asked != Slo() else objective_of(store, *words)
    found = compare_trials(store, a, b, options.allow_mixed, slo)
    console().print(found.table(lambda name: any(fnmatch(name, pattern) for pattern in wanted)))
    return 0
