"""What was said in a recorded trial: its workload is built again, and its turns are answered with the tokens it kept."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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

_COLUMNS = (
    "session", "turn", "phase", "label", "iteration", "status", "finish_reason", "finished_s", "ttft_ms", "gpu_hit_tokens",
    "cpu_hit_tokens", "disk_hit_tokens", "recomputed_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SaidTurn:
    """One turn as text. source: where its history came from, in tokens: (GPU, CPU, disk, recomputed); None where not
    counted. token_ids: the reply's."""

    turn: int
    message: str
    reply: str
    ttft_ms: float | None
    source: tuple[int | None, int | None, int | None, int | None]
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
    rows = {(row.session, row.turn): row for row in store.turns_of(trial_id, *_COLUMNS) if row.status == "completed"}
    chosen = session or next((row.session for row in rows.values() if is_measured(row.phase)), None)
    if chosen not in {name for name, _ in rows}:
        known = ", ".join(dict.fromkeys(name for name, _ in rows)) or "none"
        raise ResultsError(f"Trial {trial_id} has no conversation {chosen!r} with completed turns; it has: {known}.")
    plan = plan_trial(check(trial.config))
    tokenizer = build_tokenizer(plan.config.model, plan.model.vocab, plan.device.simulated)
    workload = make_workload(plan, tokenizer)
    waiting, said = list(workload.start()), []
    while waiting:
        request = waiting.pop(0).due()
        row = rows.get((request.session, request.turn))
        if row is None:
            continue
        reply = tokens[row.session, row.turn].token_ids if (row.session, row.turn) in tokens else ()
        if row.session == chosen:
            source = (row.gpu_hit_tokens, row.cpu_hit_tokens, row.disk_hit_tokens, row.recomputed_tokens)
            message, answer = tokenizer.decode(list(request.prompt)), tokenizer.decode([int(one) for one in reply])
            said.append(SaidTurn(row.turn, message, answer, row.ttft_ms, source, tuple(int(one) for one in reply)))
        record = TurnRecord(row.session, row.turn, phase=row.phase, label=row.label, iteration=row.iteration)
        record.status, record.finish_reason, record.finished_s = row.status, row.finish_reason, row.finished_s
        record.token_ids = array("i", [int(one) for one in reply])
        waiting += workload.on_finished(record)
    assert chosen is not None
    return chosen, sorted(said, key=lambda turn: turn.turn)


def conversation_lines(said: Iterable[SaidTurn]) -> Iterable[str]:
    """The conversation as a page: each turn's time and sources, what the user sent, and what the model answered."""
    for turn in said:
        gpu, cpu, disk, recomputed = ("–" if count is None else f"{count:,}" for count in turn.source)
        on_disk = f", {disk} from disk" if turn.source[2] else ""
        sources = f"{gpu} tokens on GPU, {cpu} from CPU{on_disk}, {recomputed} recomputed"
        yield f"{_ttft(turn)}; history: {sources}"
        yield f"  > {_indented(turn.message)}"
        yield f"    {_indented(turn.reply)}"


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
    """One conversation as two baselines served it, a column each: the message, then both replies under their TTFT. The
    title counts the replies that are equal, token for token."""
    pairs = list(zip(*said.values(), strict=False))
    equal = sum(one.token_ids == other.token_ids for one, other in pairs)
    table = Table(
        title=f"{equal} of {len(pairs)} replies equal, token for token",
        title_justify="left",
        box=box.SIMPLE,
        expand=True,
    )
    for name in said:
        table.add_column(name, ratio=1)
    for pair in pairs:
        table.add_row(*(Text(f"> {turn.message.strip()}", style="dim") for turn in pair))
        table.add_row(*(Text(f"[{_ttft(turn)}] {turn.reply.strip()}\n") for turn in pair))
    return table


def _ttft(turn: SaidTurn) -> str:
    shown = "–" if turn.ttft_ms is None else f"{turn.ttft_ms:,.0f} ms"
    return f"turn {turn.turn}, TTFT {shown}"


def _indented(text: str) -> str:
    return text.strip().replace("\n", "\n    ")
