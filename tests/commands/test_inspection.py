from array import array

import pytest

from pensieve.core.request import Length, Request
from pensieve.lab.compose.conf import options
from pensieve.lab.compose.plan import plan_trial
from pensieve.lab.trial.inspection import inspect, inspection_lines, inspection_of, print_inspections
from pensieve.lab.workload.base import Arrival, WorkloadPlan
from tests.composed import SHORT, checked

NEEDS_A_FILE = {"trace"}


@pytest.mark.parametrize("workload", sorted(set(options("workload")) - NEEDS_A_FILE))
def test_every_workload_can_be_inspected_without_an_engine(workload):
    config = checked(f"workload={workload}", "workload.inspect=true")
    plan = plan_trial(config)
    found = inspection_of(plan)
    assert found.plan.load in ("open", "closed", "partly open")
    page = "\n".join(inspection_lines(plan, found))
    assert "x cache.gpu (1,408)" in page


def test_the_same_workload_is_shown_once(capsys):
    one, other = (checked(*SHORT, f"baseline={name}") for name in ("pensieve", "stateless"))
    print_inspections([one, other, checked(*SHORT, "seed=1")])
    assert capsys.readouterr().out.count("workload=chat") == 2


@pytest.mark.parametrize(("workload", "context"), [("sharegpt", 2048), ("chat", 256)])
def test_what_the_context_cuts_is_said_first(workload, context):
    """Counted again from the same conversations under a context that holds them all."""

    def shown(positions):
        plan = plan_trial(checked(f"workload={workload}", f"model.architecture.max_position_embeddings={positions}"))
        found = inspection_of(plan)
        return inspection_lines(plan, found), found

    (title, first, *_), cut = shown(context)
    (_, whole_first, *_), whole = shown(16384)
    ended = cut.plan.facts["conversations_cut_by_context"]
    assert 0 < ended <= cut.sessions
    assert "nothing was run" in title
    assert first.startswith(f"The model's context cuts the load: {ended:,} of {cut.plan.facts['conversations']:,} conv")
    assert whole_first.startswith("  load")
    if workload == "sharegpt":  # chat writes until it has as many tokens as its pressure asks for
        assert cut.plan.facts["conversations_too_long_for_the_context"] == 0
        lost = len(whole.turns) - len(cut.turns)
        assert lost == cut.plan.facts["turns_cut_by_context"] and f"({lost:,} turns are never asked)" in first


@pytest.mark.parametrize("text", [True, False])
def test_lengths_in_bytes_are_said_first(tmp_path, text):
    said = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
    counted = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,3,4"
    (tmp_path / "file").write_text(said if text else counted)
    plan = plan_trial(checked("workload=trace", f"workload.path={tmp_path / 'file'}"))
    assert inspection_lines(plan, inspection_of(plan))[1].startswith("Tokens are bytes here") is text


class Written:
    """Arrivals that are known beforehand."""

    def __init__(self, *arrivals):
        self.arrivals = arrivals

    def describe(self):
        return WorkloadPlan("open", 2, len(self.arrivals), 99, 1)

    def start(self):
        return self.arrivals

    def on_finished(self, turn):
        assert turn.status == "completed"
        assert turn.finished_s == turn.intended_s
        return []


def arrival(number, at_s, session, tokens, reply, continues=True, **fields):
    return Arrival(at_s, Request(number, session, 1, array("i", tokens), Length(reply), **fields), continues=continues)


def test_lengths_reuse_and_rates_are_those_of_the_arrivals():
    found = inspect(
        Written(
            arrival(1, 0.0, "w", [1] * 50, 5, phase="warmup"),
            arrival(2, 1.0, "a", [1, 2, 3, 4], 2),
            arrival(3, 3.0, "a", [5, 6], 2),  # 6 of 8 prompt tokens are known
            arrival(4, 5.0, "b", [1, 2, 3, 4, 5], 1, continues=False),
            arrival(5, 11.0, "b", [1, 2, 3, 9, 9, 9], 1, continues=False),  # 3 of 6
        )
    )
    assert (found.sessions, len(found.turns), found.warmup_turns) == (2, 4, 1)
    assert [(turn.prompt, turn.new, turn.reply) for turn in found.turns] == [(4, 4, 2), (8, 2, 2), (5, 5, 1), (6, 3, 1)]
    assert found.reuse == pytest.approx(9 / 23)
    assert found.span_s == 10.0
