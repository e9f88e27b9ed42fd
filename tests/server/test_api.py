"""create_server, as the README shows it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pensieve import create_server
from pensieve.errors import ConfigError, PensieveError, RequestRefused


def server(mode: str = "pensieve", **fields: Any) -> Any:
    defaults = {"gpu_cache": "1024 tokens", "cpu_cache": "2048 tokens", "device": "cpu", "weights": "random"}
    return create_server(mode=mode, model="tiny", **{**defaults, **fields})


@pytest.fixture(autouse=True, scope="module")
def one_model() -> Any:
    """Loaded once for all of these servers: how a model is loaded is tested elsewhere."""
    from pensieve.worker.torch.shelf import open_shelf

    with open_shelf():
        yield


def test_only_the_new_message_is_sent_and_the_history_hits() -> None:
    with server() as s:
        text = s.process_request("session_1", "Hello", max_new_tokens=6, ignore_eos=True)
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
        assert s.generate("session_1", prompt_ids=[1], max_new_tokens=1).turn.history_tokens == 0


def test_modes_and_threads_give_the_same_tokens() -> None:
    outputs: dict[str, list[list[int]]] = {}
    for mode in ("pensieve", "gpu_only", "stateless", "vllm", "prefix_cache", "llama_slots"):
        with server(mode) as s, ThreadPoolExecutor(4) as pool:

            def talk(name: str, s: Any = s) -> list[int]:
                tokens: list[int] = []
                for turn in range(3):
                    prompt = [ord(name) + turn + i for i in range(20)]
                    tokens += s.generate(name, prompt_ids=prompt, max_new_tokens=5, ignore_eos=True).token_ids
                return tokens

            outputs[mode] = list(pool.map(talk, "abcdef"))
    assert all(output == outputs["stateless"] for output in outputs.values())


def test_sampling_is_reproducible_and_seeded() -> None:
    with server() as s:
        ids = [5, 6, 7, 8]
        drawn = [
            s.generate(f"s{i}", prompt_ids=ids, max_new_tokens=8, temperature=1.0, seed=seed, ignore_eos=True).token_ids
            for i, seed in enumerate((1, 1, 2))
        ]
        s.forget("s0")
        again = s.generate("s0", prompt_ids=ids, max_new_tokens=8, temperature=1.0, seed=1, ignore_eos=True).token_ids
        assert again == drawn[0]
        assert drawn[0] != drawn[2]


def test_stop_string_ends_the_reply_and_is_not_part_of_it() -> None:
    with server() as s:
        ids = s.generate("a", text="Tell me", max_new_tokens=12, ignore_eos=True).token_ids
        text = s._tokenizer.decode(ids)
        stop = next(c for c in text[2:] if c.isprintable() and c != "\ufffd")
        out = s.generate("b", text="Tell me", max_new_tokens=12, stop=stop)
        assert stop not in out.text
        assert out.turn.finish_reason in ("stop", "eos")


def test_a_reply_ends_with_any_token_that_the_model_says_ends_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chat models name several, and their tokenizer one."""
    from pensieve.worker.torch.model import LoadedModel

    asked = {"prompt_ids": [5, 6, 7], "max_new_tokens": 6}
    with server() as s:
        ids = s.generate("a", **asked, ignore_eos=True).token_ids
        assert s.generate("b", **asked).token_ids == ids
    last = next(i for i in range(2, 6) if ids[i] not in ids[:i])
    monkeypatch.setattr(LoadedModel, "eos_token_ids", frozenset({ids[last]}))
    with server() as s:
        out = s.generate("a", **asked)
    assert (out.token_ids, out.turn.finish_reason) == (ids[: last + 1], "eos")


def test_bad_input_is_one_sentence() -> None:
    with server() as s:
        with pytest.raises(RequestRefused, match=r"cache\.gpu|context"):
            s.generate("a", prompt_ids=[1] * 1500, max_new_tokens=4)
        with pytest.raises(RequestRefused, match="empty"):
            s.generate("b", prompt_ids=[], max_new_tokens=4)
        with pytest.raises(ConfigError, match="vocabulary"):
            s.generate("a", prompt_ids=[10**6], max_new_tokens=4)
        with pytest.raises(ConfigError):
            s.generate("a", prompt_ids=[1], max_new_tokens=0)
    with pytest.raises(PensieveError):
        create_server(mode="no_such_mode")
    with pytest.raises(ConfigError, match="future"):
        create_server(eviction="belady", device="sim_h100")


def test_a_simulated_server_answers_without_torch_time() -> None:
    with create_server(model="llama3_8b", device="sim_h100", gpu_cache="2GB", cpu_cache="8GB") as s:
        first = s.generate("a", prompt_ids=list(range(1000)), max_new_tokens=3).turn
        second = s.generate("a", prompt_ids=[1, 2], max_new_tokens=3).turn
    assert second.ttft_ms < first.ttft_ms
