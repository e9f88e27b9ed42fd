"""What was said in a recorded trial: its workload is built again, and its turns are answered with the tokens it kept."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from pensieve.errors import ResultsError
from pensieve.lab.compose.build import make_workload
from pensieve.lab.compose.model_files import build_tokenizer
from pensieve.lab.compose.plan import plan_trial
from pensieve.lab.compose.settings import check
from pensieve.lab.results.frame import OURS, REFERENCE, Frame
from pensieve.lab.results.schema import Sweep, Trial
from pensieve.lab.results.store import ResultsStore
from pensieve.lab.results.tokens import read_tokens
from pensieve.serve.record import TurnRecord, is_measured
from pensieve.units import three_digits

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
