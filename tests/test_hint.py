"""Hints: what a client says, when a policy may read it, and what nobody may say."""

from dataclasses import replace

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.policies.base import EvictionPolicy
from pensieve.core.request import Hint
from tests.simulated import make_engine, request, run


class Watching(EvictionPolicy):
    """Least recently used; notes what it could read."""

    def __init__(self, context):
        super().__init__(context)
        self.ordered = []
        self.admitted = []

    def order(self, session, chunk):
        self.ordered.append((session.name, session.hint))
        return session.last_active_s

    def observe(self, session, now_s):
        self.admitted.append((session.name, session.hint, now_s > session.last_active_s))


def asked(number, turn, hint, **fields):
    return replace(request(number, "a", tokens=5, output=3, turn=turn, **fields), hint=hint)


def test_a_policy_reads_a_hint_when_the_reply_is_over_and_until_the_next_one_is():
    engine = make_engine(policy=Watching)
    cache = engine.cache
    assert isinstance(cache, TwoTierCache) and isinstance(cache.policy, Watching)
    policy, calls, ends = cache.policy, Hint(stop_reason="tool_use", tool="bash", expected_s=2.0), Hint("end_turn")
    engine.say(asked(1, 1, calls))
    session = cache.sessions.get("a")
    assert session is not None
    assert session.hint is None, "the reply that it speaks of is not there yet"
    run(engine)
    assert session.hint is calls
    assert cache.tiers.dirty.choose(1, engine.clock.now_s()).spans()
    assert policy.ordered and {hint for _, hint in policy.ordered} == {calls}, "from the first choice on"
    engine.say(asked(2, 2, ends))
    engine.step(None)
    assert (session.running, session.hint) == (True, calls)
    assert policy.admitted == [("a", None, False), ("a", calls, False)], "what was said before this request came"
    run(engine)
    assert session.hint is ends


def test_of_a_reply_that_did_not_come_to_its_end_nothing_was_said():
    engine = make_engine()
    engine.say(asked(1, 1, Hint("tool_use")))
    run(engine)
    session = engine.cache.sessions.get("a")
    assert session is not None and session.hint == Hint("tool_use")
    engine.say(asked(2, 2, Hint("end_turn")))
    engine.step(None)
    engine.cancel(2, "cancelled")
    run(engine)
    assert session.hint is None
