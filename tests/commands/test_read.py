"""A recorded trial's conversation is read back: what was asked from the workload, what was answered from the kept tokens."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from pensieve.errors import ResultsError
from pensieve.lab.commands.read import SaidTurn, conversation_lines, conversation_of, side_by_side
from pensieve.lab.compose.settings import resolved
from pensieve.lab.results.tokens import read_tokens
from pensieve.lab.trial.job import Job, open_tracking
from pensieve.lab.trial.run import run_trial
from pensieve.serve.tokenizer import ByteTokenizer
from tests.composed import SHORT, checked, composed


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """The store and the id of a simulated trial of eight conversations of two turns."""
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path))
    tracking = replace(open_tracking(checked("tracking=local")), mlflow=False)
    words = ("tracking=local", *SHORT)
    job = Job("test", tracking.outputs / "runs" / "x")
    outcome = run_trial(checked(*words), resolved(composed(*words)), tracking, job, lambda text: None)
    assert outcome.completed, outcome.error
    return tracking.store, outcome.trial_id


def test_messages_come_from_the_workload_and_replies_from_the_kept_tokens(ran):
    store, trial = ran
    session, said = conversation_of(store, trial)
    [first, second] = said
    assert (session, first.turn, second.turn) == ("sourdough", 1, 2)
    assert "My sourdough starter is nine days old" in first.message
    assert "supermarket flour" in second.message and "nine days old" not in second.message
    kept = read_tokens(store.artifacts_of(trial, "tokens")[0].path)
    for turn in said:
        assert turn.reply == ByteTokenizer().decode([int(one) for one in kept[session, turn.turn].token_ids])
    rows = {row.turn: row for row in store.turns_of(trial) if row.session == session}
    for turn in said:
        assert sum(turn.source) == rows[turn.turn].history_tokens
        assert turn.ttft_ms == rows[turn.turn].ttft_ms
    page = "\n".join(conversation_lines(said))
    assert "turn 2, TTFT " in page and f"{second.source[0]} tokens on GPU" in page


def test_two_replies_stand_side_by_side_and_equal_ones_are_counted():
    ours = [SaidTurn(1, "Hello", "Hi", 5.0, (0, 0, 0, 0), (7,)), SaidTurn(2, "And?", "So", 6.0, (1, 0, 0, 0), (8,))]
    other = [ours[0], replace(ours[1], reply="No", ttft_ms=60.0, token_ids=(9,))]
    console = Console(width=100, record=True, file=StringIO())
    console.print(side_by_side({"pensieve": ours, "stateless": other}))
    page = console.export_text()
    assert "1 of 2 replies equal, token for token" in page
    [line] = [line for line in page.splitlines() if "turn 2" in line]
    assert line.index("TTFT 6 ms] So") < line.index("TTFT 60 ms] No")


def test_another_conversation_by_name_and_a_sentence_for_an_unknown_one(ran):
    store, trial = ran
    other, said = conversation_of(store, trial, "lisbon")
    assert other == "lisbon" and len(said) == 2
    with pytest.raises(ResultsError, match=r"no conversation 'nobody'.*sourdough"):
        conversation_of(store, trial, "nobody")
