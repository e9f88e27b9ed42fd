import pytest

from pensieve.core.request import is_measured
from pensieve.lab.replay import replay
from pensieve.lab.workload.cache_state import BEFORE, SALT_TOKENS, in_state
from pensieve.lab.workload.start_state import check_start, contamination
from tests.composed import SHORT, replayed
from tests.scripted import ScriptedSystem, context
from tests.workload.dry import MAKERS, drive

CHOSEN = pytest.mark.parametrize("name", ["rounds", "agents", "chat", "prefix"])


def asked(arrivals):
    return [(a.request.session, a.request.turn, list(a.due().prompt), a.request.output) for a in arrivals]


@CHOSEN
def test_cold_is_the_workload_itself(name):
    assert asked(drive(in_state("cold", MAKERS[name], context()))) == asked(drive(MAKERS[name](context())))


@CHOSEN
def test_salted_prompts_differ_from_the_first_tokens_on_and_end_as_before(name):
    plain = drive(MAKERS[name](context()))
    salted = drive(in_state("salted", MAKERS[name], context()))
    salts = {}
    for one, other in zip(plain, salted, strict=True):
        before, now = one.request, other.request
        assert (before.session, before.turn, other.at_s) == (now.session, now.turn, one.at_s)
        if one.continues and before.turn > 1:
            assert now.prompt == before.prompt
            continue
        assert now.prompt[SALT_TOKENS:] == before.prompt
        salts.setdefault(now.session, set()).add(tuple(now.prompt[:SALT_TOKENS]))
        if before.history is not None:
            assert now.history.tokens == before.history.tokens + SALT_TOKENS
    assert all(len(found) == 1 for found in salts.values()), "a conversation keeps its salt"
    assert len(set.union(*salts.values())) == len(salts)
    plan, was = in_state("salted", MAKERS[name], context()).describe(), MAKERS[name](context()).describe()
    assert plan.working_set_tokens == was.working_set_tokens + SALT_TOKENS * was.sessions
    assert plan.turns == was.turns == len(salted)


@CHOSEN
def test_warm_holds_everything_once_before_and_then_measures_the_same(name):
    plain = drive(MAKERS[name](context()))
    warm = drive(in_state("warm", MAKERS[name], context()))
    half = len(plain)
    before, measured = warm[:half], warm[half:]
    assert asked(measured) == asked(plain)
    assert [a.request.phase for a in measured] == [a.request.phase for a in plain]
    assert {a.request.phase for a in before} == {"warmup"}
    assert [(s.removeprefix(BEFORE), t, p, o) for s, t, p, o in asked(before)] == asked(plain)
    assert all(a.request.session.startswith(BEFORE) for a in before)
    assert len({a.request.id for a in warm}) == len(warm)
    assert min(a.at_s for a in measured) >= max(a.at_s for a in before) + 1.0, "after the last of them was answered"
    plan, was = in_state("warm", MAKERS[name], context()).describe(), MAKERS[name](context()).describe()
    assert plan.turns == 2 * was.turns == len(warm)
    assert plan.warmup_turns == sum(not is_measured(a.request.phase) for a in warm)


def test_a_warm_replay_measures_what_a_cold_one_does():
    cold, warm = (replay(ScriptedSystem(), in_state(state, MAKERS["rounds"], context())) for state in ("cold", "warm"))
    both = [{(t.session, t.turn): t.ttft_ms for t in one.turns if is_measured(t.phase)} for one in (cold, warm)]
    assert both[0] == pytest.approx(both[1])


def test_only_a_cache_by_content_is_warm_and_none_is_where_texts_are_salted():
    """Our engine, simulated: prefix_cache finds what others said, a cache of conversations does not."""
    shared = {}
    for baseline in ("prefix_cache", "pensieve"):
        for state in ("cold", "warm", "salted"):
            words = (*SHORT, f"baseline={baseline}", f"cache_state={state}", "cache.gpu='60000 tokens'")
            record, _ = replayed(*words)
            check_start(record.plan, record.turns)
            assert contamination(record.plan, record.turns) is None
            chat = [t for t in record.turns if is_measured(t.phase)]
            first = [t for t in chat if t.turn == 1]
            shared[baseline, state] = sum(t.shared_hit_tokens for t in first) / sum(t.prompt_tokens for t in first)
    assert {value for (name, _), value in shared.items() if name == "pensieve"} == {0.0}
    assert shared["prefix_cache", "warm"] > 0.7
    assert shared["prefix_cache", "cold"] < 0.3
    assert shared["prefix_cache", "salted"] == 0.0
