"""An endpoint of the OpenAI protocol: one that is written down here, and our own server."""

import json
from pathlib import Path
from typing import Any

import pytest

from pensieve.errors import EngineFailed, WorkerError
from pensieve.plugins.engines.base import OutsideSystem
from pensieve.plugins.engines.openai_http import OpenAIHttp
from pensieve.serve.tokenizer import ByteTokenizer
from tests.engines.endpoint import Endpoint
from tests.engines.small import ask, begun, prompt, served, setup_of


def opened(url: str, **fields: Any) -> OutsideSystem:
    return begun(OpenAIHttp(setup_of(tokenizer=ByteTokenizer()), base_url=url, **fields))


def completion(*ids: int, **rest: Any) -> dict[str, Any]:
    return {"choices": [{"text": bytes(ids).decode(), "token_ids": list(ids), "finish_reason": None}], **rest}


def test_a_streamed_completion_is_read_piece_by_piece(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what nobody had said is counted: 24 tokens of the first prompt were there, and of the second those that the first
    had said."""
    monkeypatch.setenv("SOME_KEY", "secret")
    usage: dict[str, Any] = {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 24}}
    endpoint.pieces = [completion(65), completion(66), {"choices": [], "usage": usage}]
    system = opened(endpoint.url, key_env="SOME_KEY", session_header="X-Session")
    [turn] = served(system, ask(1, "anna", prompt(40), output=2))
    assert list(turn.token_ids) == [65, 66] and len(turn.emitted_s) == 2
    assert turn.shared_hit_tokens == 24, "cached, and nobody said it before in this conversation"
    [(path, body, headers)] = endpoint.asked
    assert path == "/v1/completions"
    assert body["prompt"] == list(prompt(40)) and body["model"] == "served" and body["max_tokens"] == 2
    assert headers["authorization"] == "Bearer secret" and headers["x-session"] == "anna"
    assert turn.sent_bytes == int(headers["content-length"]) and (turn.received_bytes or 0) > 100
    assert "secret" not in json.dumps(system.settings())
    [same] = served(system, ask(2, "b", prompt(40), output=2))
    usage["prompt_tokens"] = 47  # it puts seven tokens of its own around each prompt
    [around] = served(system, ask(3, "c", prompt(20, start=9) + prompt(20), output=2))
    assert [one.unexplained_tokens for one in (turn, same, around)] == [24, 0, 17]


def test_a_server_without_usage_and_ids_leaves_them_open(endpoint: Endpoint) -> None:
    endpoint.pieces = [{"choices": [{"text": "Hi", "finish_reason": "length"}]}]
    system = opened(endpoint.url, prompts="text")
    [turn] = served(system, ask(1, "a", prompt(40, vocab=100), output=2, stream=False))
    assert list(turn.token_ids) == [72, 105]
    assert turn.gpu_hit_tokens is turn.shared_hit_tokens is turn.recomputed_tokens is None
    assert endpoint.asked[0][1]["prompt"] == ByteTokenizer().decode(prompt(40, vocab=100))
    assert {system.settings()[name] for name in ("gpu_tokens", "cpu_tokens", "dtype")} == {None}


@pytest.mark.parametrize(
    ("status", "piece", "ended", "said"),
    [
        (400, {"error": {"message": "maximum context length is 8", "code": 400}}, "refused", "context length is 8"),
        (403, {"error": {"message": "moderated"}}, "failed", "The engine answered 403: moderated."),
        (429, {"error": {"message": "Rate limit", "code": "rate_limit_exceeded"}}, "failed", "429: Rate limit."),
        (200, {"error": {"message": "overloaded", "code": "busy"}}, "failed", "overloaded"),
    ],
)
def test_a_request_that_is_refused_or_fails_does_so_alone_and_is_not_asked_twice(
    endpoint: Endpoint, status: int, piece: dict[str, Any], ended: str, said: str
) -> None:
    system = opened(endpoint.url)
    endpoint.status, endpoint.pieces = status, [piece]
    for number, stream in enumerate((True, False)):
        [turn] = served(system, ask(number, "a", prompt(40), stream=stream))
        assert turn.status == ended and said in str(turn.error)
        assert (turn.finish_reason == "context") == (ended == "refused")
    endpoint.status, endpoint.pieces = 200, [completion(65)]
    [whole] = served(system, ask(2, "b", prompt(40), output=1))
    assert whole.status == "completed" and len(endpoint.asked) == 3


def test_a_stream_that_breaks_off_fails_its_request_alone_and_a_server_that_is_gone_ends_the_trial(
    endpoint: Endpoint,
) -> None:
    system = opened(endpoint.url)
    endpoint.pieces = [completion(65)]
    for number, endpoint.drops in enumerate(("early", "silently", "at once")):
        [broken] = served(system, ask(number, "a", prompt(40), output=2))
        assert (broken.status, list(broken.token_ids)) == ("failed", [65] * (number < 2))
        assert "broke off its answer" in str(broken.error)
    endpoint.drops = ""
    [whole] = served(system, ask(9, "b", prompt(40), output=1))
    assert whole.status == "completed" and len(endpoint.asked) == 4, "nothing is asked twice"
    endpoint.shutdown()
    endpoint.server_close()
    system.submit(ask(10, "a", prompt(40), output=2))
    with pytest.raises(WorkerError, match="does not answer"):
        system.poll(None)


def test_a_key_that_is_refused_ends_the_trial_and_is_not_told(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    endpoint.listing = 401, {"error": {"message": "no"}}
    with pytest.raises(EngineFailed, match=r"refuses the key in the environment variable SOME_KEY \(401\)") as caught:
        opened(endpoint.url, key_env="SOME_KEY", start_timeout_s=60)
    assert "secret" not in str(caught.value)
    endpoint.listing = 200, {"data": [{"id": "served"}]}  # some list their models to anybody
    system = opened(endpoint.url)
    endpoint.status, endpoint.pieces = 401, [{"error": {"message": "Invalid API Key"}}]
    system.submit(ask(1, "a", prompt(40)))
    with pytest.raises(WorkerError, match=r"Invalid API Key.*key_env"):
        system.poll(None)


@pytest.mark.slow
def test_our_own_server_over_the_wire(tmp_path: Path) -> None:
    """Whole prompts in token ids, whose replies go on past the end of sequence; what returns from CPU is told as that."""
    pytest.importorskip("fastapi")
    from pensieve.serve.server import create_server
    from tests.server.live import REAL, serving

    def turns(system: Any, stream: bool) -> list[Any]:
        said = {name: prompt(150, start=at) for at, name in enumerate(("anna", "ben", "cora"), 5)}
        found = []
        for turn in (1, 2):
            for name in said:
                request = ask(len(found), name, said[name], output=7, stream=stream, turn=turn)
                [record] = served(system, request)
                assert record.status == "completed", record.error
                said[name] = said[name] + record.token_ids + prompt(20)
                found.append(record)
        return found

    small = {**REAL, "gpu_cache": "320 tokens", "cpu_cache": "2048 tokens"}
    with create_server(**small) as plain:
        expected = turns(plain.system, stream=True)
    for stream, header in ((True, None), (False, "X-Session-Id")):
        told: list[Any] = []
        with create_server(**small) as server, serving(server) as (_, url):
            server.observe(lambda _, record, told=told: told.append(record))
            system = opened(url + "/v1", session_header=header)
            got = turns(system, stream)
            system.close()
        assert [list(one.token_ids) for one in got] == [list(one.token_ids) for one in expected]
        for name in ("history_tokens", "gpu_hit_tokens", "cpu_hit_tokens", "recomputed_tokens"):
            # What is on the GPU at a moment hangs on measured times; what came over the wire is what the server counted.
            assert [getattr(one, name) for one in got] == [getattr(one, name) for one in told], name
        assert [one.history_tokens for one in got] == [one.history_tokens for one in expected]
        assert sum(one.cpu_hit_tokens for one in got) > 0
        if stream:
            assert all(len(one.emitted_s) == 7 for one in got), "each token came by itself"
