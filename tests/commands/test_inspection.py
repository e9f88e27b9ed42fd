import pytest

from pensieve.lab.commands.inspection import inspection_lines, inspection_of, print_inspections
from pensieve.lab.compose import options, plan_trial
from tests.composed import SHORT, checked

NEEDS_A_FILE = {"trace"}


@pytest.mark.parametrize("workload", sorted(set(options("workload")) - NEEDS_A_FILE))
def test_every_workload_can_be_inspected_without_an_engine(workload):
    config = checked(f"workload={workload}", "workload.inspect=true")
    plan = plan_trial(config)
    found = inspection_of(plan)
    assert found.plan.load in ("open", "closed", "partly open")
    page = "\n".join(inspection_lines(plan, found))
    for part in (
        "sessions",
        "measured",
        "prompt tokens a turn",
        "reuse",
        "rates",
        "working set",
        "x cache.gpu (1,408)",
    ):
        assert part in page


def test_a_workload_that_does_not_fit_is_shown_and_says_so():
    plan = plan_trial(checked("cache.gpu=512 tokens", "workload.pressure=0"))
    assert any("does not fit into cache.gpu" in line for line in inspection_lines(plan, inspection_of(plan)))


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
