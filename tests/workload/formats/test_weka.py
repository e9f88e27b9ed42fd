"""WEKA's sessions of agents: what is shared, what is paused, who waits for whom."""

import json

import pytest

from pensieve.errors import MalformedInput
from pensieve.lab.replay import replay
from pensieve.lab.workload.formats import load
from pensieve.lab.workload.playback import Begun
from pensieve.lab.workload.trace import trace_workload
from tests.scripted import ScriptedSystem, context
from tests.workload.dry import drive, measured


def call(t, hashes, tokens=None, api=2.0, think=None, stop="tool_use"):
    row = {"t": t, "type": "n", "in": 4 * len(hashes) + 1 if tokens is None else tokens, "out": 3, "hash_ids": hashes}
    known = {"api_time": api, "think_time": think}
    return row | {"stop": stop} | {name: value for name, value in known.items() if value is not None}


def session(folder, name, *requests, tools=8, system=4):
    row = {"id": name, "block_size": 4, "hash_id_scope": "local", "tool_tokens": tools, "system_tokens": system}
    (folder / f"{name}.json").write_text(json.dumps(row | {"requests": list(requests)}))
    return folder


def sub_agent(t, duration_ms, *requests, name="agent_001"):
    return {"type": "subagent", "agent_id": name, "t": t, "duration_ms": duration_ms, "tool_tokens": 4,
            "system_tokens": 0, "requests": list(requests)}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    session(
        tmp_path, "a",
        call(0.0, [1, 2, 3, 4]),
        call(9.0, [1, 2, 3, 4, 5], think=7.0, api=None, stop=""),
        call(15.0, [1, 2, 3, 4, 5, 6], think=13.0, stop="end_turn"),
        call(100.0, [1, 2, 3, 4, 5, 6, 7], think=83.0),
    )  # fmt: skip
    return session(tmp_path, "b", call(0.0, [1, 2, 3, 4]), call(4.0, [8, 9], think=2.0))


def build(path, seed=0, **fields):
    return trace_workload(context(seed), path=str(path), format="weka", **fields)


def times(workload, service_s=1.0, fail=()):
    sent = measured(drive(workload, service_s, fail))
    start = min(one.at_s for one in sent)
    return {(one.request.session, one.request.turn): round(one.at_s - start, 6) for one in sent}


def test_tools_and_system_prompts_of_equal_length_are_shared_and_nothing_else(tmp_path):
    for name, tools, system in (("a", 8, 4), ("b", 8, 4), ("c", 8, 8), ("d", 4, 8)):
        session(tmp_path, name, call(0.0, [1, 2, 3, 4]), call(9.0, [4, 1]), tools=tools, system=system)
    a, b, c, d = (one.calls[0].content.hashes for one in load(tmp_path, "weka").conversations)
    assert a[:3] == b[:3] and a[3] != b[3], "two blocks of tools and one of the system prompt"
    assert c[:2] == a[:2] and c[2] != a[2], "the same tools before another system prompt"
    assert not set(d) & {*a, *b, *c}
    again = load(tmp_path, "weka").conversations[0].calls[1].content.hashes
    assert list(again) == [a[3], a[0]], "an id of the file is the same block wherever it stands"


def test_closed_loop_the_next_request_comes_a_pause_after_the_reply(folder):
    at = times(build(folder, users="all"), service_s=5.0)
    assert at["weka-a", 1] == at["weka-b", 1] == 0.0
    assert [at["weka-a", turn] for turn in (2, 3, 4)] == [12.0, 23.0, 111.0]
    assert at["weka-b", 2] == 7.0
    for hint, told in (("recorded", {"tool_use", "end_turn", None}), ("none", {None})):
        hints = [one.request.hint for one in measured(drive(build(folder, users="all", hint=hint)))]
        assert {one and one.stop_reason for one in hints} == told
    halved = times(build(folder, users="all", think_scale=0.5), service_s=5.0)
    assert [halved["weka-a", turn] for turn in (2, 3, 4)] == [8.5, 16.5, 63.0]


@pytest.fixture
def family(tmp_path):
    """The first request begins two agents; the second request waits for both, 3 s after the later one."""
    return session(
        tmp_path, "p",
        call(0.0, [1, 2, 3, 4]),
        sub_agent(20.0, 17_500, call(0.0, [11, 12]), call(6.0, [11, 12, 13], think=4.0), name="long"),
        sub_agent(10.0, 8_000, call(0.0, [11, 4]), name="short"),
        call(23.0, [1, 2, 3, 4, 5], think=21.0),
        call(30.0, [1, 2, 3, 4, 5, 6], think=5.0),
    )  # fmt: skip


def test_sub_agents_are_conversations_in_the_names_of_their_parent(family):
    parent, long, short = load(family, "weka").conversations
    assert [one.id for one in (parent, long, short)] == ["weka-p", "weka-p/long", "weka-p/short"]
    assert long.begun == short.begun == Begun("weka-p", 1)
    assert [one.calls[0].pause_s for one in (long, short)] == [0.5, 0.0], "they began 17.5 s and 8 s before they ended"
    assert parent.calls[1].waits_for == ("weka-p/long", "weka-p/short") and parent.calls[1].pause_s == 3.0
    assert short.calls[0].content.hashes[1] == parent.calls[0].content.hashes[3], "one namespace"
    assert short.calls[0].content.hashes[0] == long.calls[0].content.hashes[0]


def test_a_parent_waits_for_those_it_began_however_long_they_take(family):
    at = times(build(family, users="all"), service_s=10.0)
    assert at == {
        ("weka-p", 1): 0.0, ("weka-p/short", 1): 10.0, ("weka-p/long", 1): 10.5, ("weka-p/long", 2): 24.5,
        ("weka-p", 2): 37.5, ("weka-p", 3): 52.5,
    }  # fmt: skip
    for broken in ({("weka-p/long", 1)}, {("weka-p/long", 2)}):
        assert ("weka-p", 3) in times(build(family, users="all"), fail=broken), "a failure ends the wait too"
    alone = times(build(family, users="all"), fail={("weka-p", 1)})
    assert set(alone) == {("weka-p", 1)}, "what a failed reply would have begun never begins"


def test_waiting_for_others_is_not_having_nothing_left_to_ask(family):
    session(family, "q", *(call(50.0 * n, [1, 2, 3, 4], think=48.0) for n in range(5)))
    workload = build(family, users="all")
    record = replay(ScriptedSystem(), workload)
    ends = {(turn.session, turn.turn): turn.finished_s for turn in record.turns}
    assert ends["weka-p/short", 1] < ends["weka-p", 3] < ends["weka-q", 5]
    assert "unsent" not in record.flags


def test_what_a_context_cuts_off_begins_nobody(tmp_path):
    session(
        tmp_path, "p", call(0.0, [1, 2, 3, 4]), call(5.0, [1, 2, 3, 4, 5], think=3.0),
        sub_agent(9.0, 1_000, call(0.0, [11])), call(20.0, [1, 2, 3, 4, 5, 6], think=13.0),
    )  # fmt: skip
    whole, cut = build(tmp_path, users="all"), build(tmp_path, users="all", max_context=22)
    assert whole.describe().facts["begun_by_others"] == cut.describe().facts["begun_by_others_left_out"] == 1
    assert set(times(whole)) == {("weka-p", 1), ("weka-p", 2), ("weka-p", 3), ("weka-p/agent_001", 1)}
    assert set(times(cut)) == {("weka-p", 1)}


@pytest.mark.parametrize(
    ("requests", "reason"),
    [
        ([call(5.0, [1]), call(4.0, [1])], r"request 1 of weka-x: t=4\.0 lies before"),
        ([call(0.0, [1, 2], tokens=7)], "has no room for its hash_ids"),
        ([call(0.0, [-1])], "hash_ids are numbers below"),
        ([call(0.0, [1.5])], "no whole numbers"),
        ([], "has no request"),
        ([sub_agent(1.0, 1, call(0.0, [1]))], "before the first request"),
    ],
)
def test_a_malformed_session_is_named_and_counted(tmp_path, requests, reason):
    session(session(tmp_path, "ok", call(0.0, [1, 2])), "x", *requests)
    with pytest.raises(MalformedInput, match=rf"x\.json:1: .*{reason}"):
        load(tmp_path, "weka")
    assert (load(tmp_path, "weka", "skip").malformed, len(load(tmp_path, "weka", "skip").conversations)) == (1, 1)
