"""What was said in a recorded trial: its workload is built again, and its turns are answered with the tokens it kept."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pensieve.compose import build_tokenizer, check, make_workload, plan_trial
from pensieve.errors import ResultsError
from pensieve.record import TurnRecord
from pensieve.request import is_measured
from pensieve.results.store import ResultsStore
from pensieve.results.tokens import read_tokens

_COLUMNS = (
    "session", "turn", "phase", "label", "iteration", "status", "finish_reason", "finished_s", "ttft_ms", "gpu_hit_tokens",
    "cpu_hit_tokens", "disk_hit_tokens", "recomputed_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SaidTurn:
    """One turn as text. source: where its history came from, in tokens: (GPU, CPU, disk, recomputed); None where not
    counted."""

    turn: int
    message: str
    reply: str
    ttft_ms: float | None
    source: tuple[int | None, int | None, int | None, int | None]


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
            said.append(SaidTurn(row.turn, message, answer, row.ttft_ms, source))
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
        ttft = "–" if turn.ttft_ms is None else f"{turn.ttft_ms:,.0f} ms"
        on_disk = f", {disk} from disk" if turn.source[2] else ""
        sources = f"{gpu} tokens on GPU, {cpu} from CPU{on_disk}, {recomputed} recomputed"
        yield f"turn {turn.turn}: first token after {ttft}; history: {sources}"
        yield f"  > {_indented(turn.message)}"
        yield f"    {_indented(turn.reply)}"


def _indented(text: str) -> str:
    return text.strip().replace("\n", "\n    ")
