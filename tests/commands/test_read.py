"""A recorded trial's conversation is read back: what was asked from the workload, what was answered from the kept tokens."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from pensieve.errors import ResultsError
from pensieve.lab.commands.results import conversation_of, side_by_side
from pensieve.lab.results.tokens import read_tokens
from pensieve.serve.tokenizer import ByteTokenizer
from tests.trial.running import run


def test_messages_come_from_the_workload_and_replies_from_the_kept_tokens(tracking):
    store, trial = tracking.store, run(tracking).trial_id
    session, said = conversation_of(store, trial)
    [first, second] = said
    assert (session, first.row.turn, second.row.turn) == ("sourdough", 1, 2)
    assert "My sourdough starter is nine days old" in first.message
    assert "supermarket flour" in second.message and "nine days old" not in second.message
    kept = read_tokens(store.artifacts_of(trial, "tokens")[0].path)
    for turn in said:
        assert turn.reply == ByteTokenizer().decode([int(one) for one in kept[session, turn.row.turn].token_ids])
    other, talk = conversation_of(store, trial, "lisbon")
    assert other == "lisbon" and len(talk) == 2
    with pytest.raises(ResultsError, match=r"no conversation 'nobody'.*sourdough"):
        conversation_of(store, trial, "nobody")
    # Beside another one that says something else in the second turn.
    console = Console(width=120, record=True, file=StringIO())
    console.print(side_by_side({"pensieve": said, "stateless": [first, replace(second, reply="No", token_ids=(9,))]}))
    page = console.export_text()
    assert "1 of 2 replies equal, token for token" in page and "] No" in page
    assert f"history: {second.row.gpu_hit_tokens} GPU" in page
