"""create_server, as the README shows it; streams, futures and cancellation."""

import json
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from pensieve import create_server
from pensieve.core.request import Free, Sampling
from pensieve.errors import CapacityError, ConfigError, ContextLengthError, RequestRefused
from pensieve.lab.compose.conf import read_option
from pensieve.serve.server.api import Stream
from tests.invariants import check_cache
from tests.server import live
from tests.server.live import REAL, Hold, held
from tests.waiting import PATIENCE_S

SIMULATED = {**live.SIMULATED, "gpu_cache": "1024 tokens", "cpu_cache": "2048 tokens"}


def test_only_the_new_message_is_sent_and_the_history_hits():
    with create_server(**REAL) as s:
        text = s.process_request("session_1", "Hello", max_new_tokens=6, stop=None, ignore_eos=True)
        assert isinstance(text, str)
        out = s.generate("session_1", prompt_ids=[1, 2, 3], max_new_tokens=4, ignore_eos=True)
        assert len(out.token_ids) == 4
        assert (out.turn.prompt_tokens, out.turn.history_tokens, out.turn.gpu_hit_tokens) == (14, 10, 10)
        assert out.turn.ttft_ms > 0
        statistics = s.get_statistics()
        assert statistics["turns"] == 2
        assert statistics["gpu_hit_rate"] == 1.0
        assert "2 turns" in s.get_statistics_str()
        s.forget("session_1")
        forgotten = s.generate("session_1", prompt_ids=[1], max_new_tokens=1).turn
        assert (forgotten.turn, forgotten.history_tokens) == (1, 0)


def test_modes_and_threads_give_the_same_tokens():
    outputs = {}
    for mode in ("pensieve", "gpu_only", "stateless", "prefix_cache", "llama_slots"):
        with create_server(mode, **REAL) as s, ThreadPoolExecutor(4) as pool:

            def talk(name, s=s):
                tokens = []
                for turn in range(3):
                    prompt = [ord(name) + turn + i for i in range(20)]
                    tokens += s.generate(name, prompt_ids=prompt, max_new_tokens=5, ignore_eos=True).token_ids
                return tokens

            outputs[mode] = list(pool.map(talk, "abcdef"))
    assert all(output == outputs["stateless"] for output in outputs.values())


def test_a_reply_ends_with_any_token_that_the_model_says_ends_one(monkeypatch):
    """Chat models name several, and their tokenizer one."""
    from pensieve.device.model import LoadedModel

    asked = {"prompt_ids": [5, 6, 7], "max_new_tokens": 6}
    with create_server(**REAL) as s:
        ids = s.generate("a", **asked, ignore_eos=True).token_ids
        assert s.generate("b", **asked).token_ids == ids
    last = next(i for i in range(2, 6) if ids[i] not in ids[:i])
    monkeypatch.setattr(LoadedModel, "eos_token_ids", frozenset({ids[last]}))
    with create_server(**REAL) as s:
        out = s.generate("a", **asked)
    assert (out.token_ids, out.turn.finish_reason) == (ids[: last + 1], "eos")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"prompt_ids": [320]}, r"\[0, 320\), the model's vocabulary"),
        *(
            ({"prompt_ids": [1], name: "x"}, name)  # which values make no sense: tests/test_request.py
            for name in ("temperature", "top_p", "top_k", "seed", "max_new_tokens")
        ),
        ({"prompt_ids": [1], "session_id": "a "}, "session_id"),
        ({"prompt_ids": [1], "stop": ""}, "stop string is empty"),
        ({"text": "\ud800"}, "text"),
        ({"prompt_ids": [1], "text": "a"}, "either"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_and_the_server_goes_on(simulated, asked, says):
    with pytest.raises(ConfigError, match=says):
        simulated.generate(**{"session_id": "a", "max_new_tokens": 4, **asked})
    assert len(simulated.generate("b", prompt_ids=[1], max_new_tokens=2, top_k=2**62).token_ids) == 2


@pytest.fixture(scope="module")
def simulated():
    with create_server(**SIMULATED) as s:
        yield s


def test_a_request_that_can_never_be_served_is_refused_and_has_not_failed(simulated):
    """Nor one whose conversation grew while it waited."""
    before = simulated.get_statistics()
    never = {"prompt_ids": [1] * 1500, "max_new_tokens": 4}
    for ask in (simulated.generate, lambda *a, **f: list(simulated.stream(*a, **f))):
        with pytest.raises(CapacityError, match=r"raise cache\.gpu or"):
            ask("never", **never)
    with pytest.raises(ContextLengthError, match="context is 8192"):
        simulated.generate("never", prompt_ids=[1], max_new_tokens=10**18)
    with pytest.raises(RequestRefused, match="empty") as caught:
        simulated.generate("never", prompt_ids=[], max_new_tokens=4)
    assert type(caught.value) is RequestRefused
    both = [simulated.submit("grows", [1] * 700, max_new_tokens=100, ignore_eos=True) for _ in range(2)]
    assert simulated.wait(both[0]).token_ids
    with pytest.raises(CapacityError):
        simulated.wait(both[1])
    after = simulated.get_statistics()
    assert [after[name] - before[name] for name in ("turns", "refused_turns", "failed_turns")] == [6, 5, 0]
    assert "0 turns failed" in simulated.get_statistics_str()
    assert simulated.conversations.find("", "never") is None, "what never began leaves nothing"


def test_a_conversation_that_the_engine_forgot_by_itself_goes_on_from_its_tokens(simulated):
    simulated.generate("idle", prompt_ids=[5, 6, 7], max_new_tokens=2)
    simulated.system.forget("idle")  # as a limit on what is remembered does
    turn = simulated.generate("idle", prompt_ids=[5], max_new_tokens=1).turn
    assert (turn.turn, turn.prompt_tokens, turn.gpu_hit_tokens) == (2, 6, 0)


@pytest.mark.parametrize("first", [0, 100])
def test_what_was_said_before_an_edit_that_was_cancelled_is_history(first):
    with create_server("prefix_cache", **SIMULATED) as s:
        said = cancelled_edit(s, first)
        told = s.wait(ask(s, [*said, 9, 9, 9])).turn
    assert (told.prompt_tokens, told.history_tokens) == (311, 307)
    assert (told.gpu_hit_tokens, told.shared_hit_tokens) == (288, 0), "all full blocks"
    assert {miss.cause: miss.tokens for miss in told.misses} == {"edited": 19, "new": 4}


def test_a_conversation_deleted_after_an_edit_that_was_cancelled_leaves_the_disk():
    with create_server(**SIMULATED, disk_cache="65536 tokens") as s:
        below = s.system.engine.cache.below
        cancelled_edit(s, 100, others=4)
        for name in ("talk", *(f"other{number}" for number in range(4))):
            assert below.used and s.end_session("", name)
        s.system.poll(None)  # the engine learns of it
        assert below.used == 0


def ask(s, prompt):
    """A whole prompt of the conversation `talk`."""
    turn = s.turn(Free(8, ignore_eos=True), Sampling())
    s.conversations.complete(turn, "", "talk", prompt, True)
    return turn.future


def cancelled_edit(s, first, others=0):
    """All that was said before a prompt that is another from token `first` on, and is cancelled in its prefill."""
    said = [7 * i % 250 for i in range(300)]
    said += s.wait(ask(s, said)).token_ids
    for number in range(others):
        s.generate(f"other{number}", [number, *range(100)] * 9, max_new_tokens=1)
    edited = ask(s, [*said[:first], *[5] * 600])
    while not s.system.engine.scheduler.running:
        s.system.poll(s.system.clock.now_s() + 1e-9)  # an iteration: of its prefill the first of two
    s.cancel("talk")
    assert s.wait(edited).turn.admitted_s and not s.wait(edited).token_ids
    return said


def test_a_restored_conversation_whose_first_turn_came_to_nothing_leaves_nothing_behind(simulated):
    simulated.generate("talk", prompt_ids=[5, 6, 7], max_new_tokens=2)
    talk = simulated.conversations.find("", "talk")
    with create_server(**SIMULATED) as s:
        s.conversations.restore(talk)
        turn = s.submit("talk", [5], max_new_tokens=4)
        s.cancel("talk")
        s.wait(turn)
        assert talk.restored and list(s.system.engine.cache.sessions) == [talk.engine_name]
        s.end_session("", "talk")
        s.generate("other", prompt_ids=[1], max_new_tokens=1)  # the engine learns of it with the next turn
        assert talk.engine_name not in s.system.engine.cache.sessions


def test_a_folder_speaks_with_its_own_tokenizer_whatever_its_weights(tmp_path):
    words = Backend(WordLevel({f"w{i}": i for i in range(320)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    architecture = read_option("model", "tiny")["architecture"]
    (tmp_path / "config.json").write_text(json.dumps(architecture))
    (tmp_path / "model.safetensors").write_bytes(b"")
    for weights in (None, "random"):
        with create_server(model=str(tmp_path), weights=weights, **SIMULATED) as s:
            assert s.generate("a", text="w5 w6 w7", max_new_tokens=1).turn.prompt_tokens == 3
            assert s.get_statistics()["engine"]["tokenizer"] == tmp_path.name


def test_a_policy_that_reads_the_future_serves_nobody():
    with pytest.raises(ConfigError, match="live traffic has none"):
        create_server(**SIMULATED, eviction="oracle_hint")


@pytest.fixture(scope="module")
def real():
    with create_server(**REAL) as s:
        yield s


def test_a_stop_string_is_not_streamed_and_is_no_part_of_the_conversation(real):
    whole = real.generate("a", text="Tell me", max_new_tokens=24, ignore_eos=True)
    stop = next(c for c in whole.text[1:] if c.isprintable() and c != "\ufffd")
    stream = real.stream("b", text="Tell me", max_new_tokens=24, stop=stop)
    text = "".join(stream)
    assert text == stream.result().text == whole.text[: whole.text.index(stop)]
    told = real.generate("b", text=" more", max_new_tokens=1).turn
    assert told.prompt_tokens == len(b"Tell me" + text.encode() + b" more")
    assert told.recomputed_tokens == 0, "what is encoded in another way than it was said is new"


def test_futures_are_served_together_and_in_the_order_of_a_conversation(real):
    with held(real):
        steps = real.get_statistics()["steps"]
        futures = [real.submit(f"f{i}", text="Hello", max_new_tokens=8, ignore_eos=True) for i in range(4)]
        second = real.submit("f0", text=" again", max_new_tokens=2, ignore_eos=True)
    wait([*futures, second])
    assert second.result().turn.prompt_tokens == 5 + 8 + 6
    assert len({tuple(f.result().token_ids) for f in futures}) == 1
    assert real.get_statistics()["steps"] - steps < 4 * 8


def test_cancelling_keeps_what_was_generated_and_frees_the_rest(real, monkeypatch):
    """The engine is held up when the stream has some of its tokens, so that what comes then comes before its end."""
    early, on_event = Hold(events=40), Stream.on_event
    monkeypatch.setattr(Stream, "on_event", lambda stream, event: (on_event(stream, event), early(event)))
    stream = real.stream("long", text="Hello", max_new_tokens=900, ignore_eos=True)
    first = next(iter(stream))
    assert early.reached.wait(PATIENCE_S)
    waiting = real.submit("long", text="later", max_new_tokens=900)
    assert real.cancel("long") == 2
    early.release()
    result = stream.result()
    assert result.turn.status == "cancelled"
    assert 40 <= len(result.token_ids) < 900
    assert result.text.startswith(first)
    assert real.wait(waiting).token_ids == []
    with held(real):
        at_once = real.stream("at once", text="Hello", max_new_tokens=900)
        at_once.cancel()
    assert not any(at_once) and at_once.result().turn.status == "cancelled"
    after = real.generate("long", text=" on", max_new_tokens=2, ignore_eos=True).turn
    assert after.prompt_tokens == 5 + len(result.token_ids) + 3
    assert real.cancel("long") == 0
    check_cache(real.system.engine.cache)


def test_a_listener_that_fails_harms_nobody_else(real):
    def broken(_):
        raise RuntimeError("gone")

    turn = real.asking(max_new_tokens=4)
    turn.on_event = broken
    real.say("broken", turn, text="Hello")
    other = real.submit("other", text="Hello", max_new_tokens=4)
    assert real.wait(turn.future).token_ids == real.wait(other).token_ids
