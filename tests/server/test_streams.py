"""Streams, futures and cancellation of the programmatic API."""

from __future__ import annotations

import threading
from concurrent.futures import wait

import pytest

import pensieve.serve.server
from pensieve.errors import CapacityError, ConfigError, RequestFailed
from pensieve.serve.server.api import Stream
from tests.server.live import PATIENCE_S, Hold, held, until

REAL = {"device": "cpu", "weights": "random", "gpu_cache": "1024 tokens", "cpu_cache": "1024 tokens"}
SIMULATED = {"device": "sim_h100", "gpu_cache": "1024 tokens", "cpu_cache": "2048 tokens"}


@pytest.fixture(scope="module")
def server():
    with pensieve.serve.server.create_server(**REAL) as s:
        yield s


@pytest.fixture
def simulated():
    with pensieve.serve.server.create_server(**SIMULATED) as s:
        yield s


def test_a_stream_is_the_reply_in_pieces(server):
    whole = server.generate("whole", text="Hello", max_new_tokens=12, ignore_eos=True)
    stream = server.stream("stream", text="Hello", max_new_tokens=12, ignore_eos=True)
    pieces = list(stream)
    assert len(pieces) > 1
    assert "".join(pieces) == whole.text == stream.result().text
    assert stream.result().token_ids == whole.token_ids


def test_a_stop_string_is_not_streamed_and_is_no_part_of_the_conversation(server):
    whole = server.generate("a", text="Tell me", max_new_tokens=24, ignore_eos=True)
    stop = next(c for c in whole.text[1:] if c.isprintable() and c != "\ufffd")
    stream = server.stream("b", text="Tell me", max_new_tokens=24, stop=stop)
    text = "".join(stream)
    assert stop not in text
    assert text == whole.text[: whole.text.index(stop)]
    told = server.generate("b", text=" more", max_new_tokens=1).turn
    assert told.prompt_tokens == len(b"Tell me" + text.encode() + b" more")
    assert told.recomputed_tokens == 0, "what is encoded in another way than it was said is new"


def test_futures_are_served_together_and_in_the_order_of_a_conversation(server):
    with held(server):
        steps = server.get_statistics()["steps"]
        futures = [server.submit(f"f{i}", text="Hello", max_new_tokens=8, ignore_eos=True) for i in range(4)]
        second = server.submit("f0", text=" again", max_new_tokens=2, ignore_eos=True)
    wait([*futures, second])
    assert second.result().turn.prompt_tokens == 5 + 8 + 6
    assert len({tuple(f.result().token_ids) for f in futures}) == 1
    assert server.get_statistics()["steps"] - steps < 4 * 8


def test_errors_come_out_of_futures_and_streams(simulated):
    with pytest.raises(CapacityError):
        simulated.wait(simulated.submit("a", prompt_ids=[1] * 1500, max_new_tokens=4))
    with pytest.raises(CapacityError):
        list(simulated.stream("a", prompt_ids=[1] * 1500, max_new_tokens=4))
    with pytest.raises(ConfigError, match="vocabulary"):
        simulated.stream("a", prompt_ids=[10**6])
    assert simulated.conversations.find("", "a") is None, "what never began leaves nothing"


@pytest.fixture
def early(monkeypatch):
    """The engine is held up when the stream has some of its tokens, so that what comes then comes before its end."""
    hold, on_event = Hold(events=40), Stream.on_event

    def told(stream, event):
        on_event(stream, event)
        hold(event)

    monkeypatch.setattr(Stream, "on_event", told)
    yield hold
    hold.release()


def test_cancelling_keeps_what_was_generated_and_frees_the_rest(server, early):
    stream = server.stream("long", text="Hello", max_new_tokens=900, ignore_eos=True)
    first = next(iter(stream))
    assert early.reached.wait(PATIENCE_S)
    waiting = server.submit("long", text="later", max_new_tokens=900)
    assert server.cancel("long") == 2
    early.release()
    result = stream.result()
    assert result.turn.status == "cancelled"
    assert 40 <= len(result.token_ids) < 900
    assert result.text.startswith(first)
    assert server.wait(waiting).token_ids == []
    with held(server):
        at_once = server.stream("at once", text="Hello", max_new_tokens=900)
        at_once.cancel()
    assert not any(at_once) and at_once.result().turn.status == "cancelled"
    after = server.generate("long", text=" on", max_new_tokens=2, ignore_eos=True).turn
    assert after.prompt_tokens == 5 + len(result.token_ids) + 3
    assert server.cancel("long") == 0
    server.system.engine.cache.check()


def test_closing_ends_streams_and_futures(early):
    server = pensieve.serve.server.create_server(**REAL)
    running = server.stream("a", text="Hello", max_new_tokens=900, ignore_eos=True)
    next(iter(running))
    assert early.reached.wait(PATIENCE_S)
    waiting = server.submit("a", text="Hello", max_new_tokens=900)
    closing = threading.Thread(target=server.close)
    closing.start()
    assert until(lambda: not server.system._inbox.empty()), "the engine is told to end"
    early.release()
    with pytest.raises(RequestFailed, match="closed"):
        running.result()
    with pytest.raises(RequestFailed, match="closed"):
        waiting.result(timeout=PATIENCE_S)
    closing.join(PATIENCE_S)
    assert server.under_way == 0


def test_a_listener_that_fails_harms_nobody_else(server):
    def broken(_):
        raise RuntimeError("gone")

    turn = server.asking(max_new_tokens=4)
    turn.on_event = broken
    server.say("broken", turn, text="Hello")
    other = server.submit("other", text="Hello", max_new_tokens=4)
    assert server.wait(turn.future).token_ids == server.wait(other).token_ids
