"""llama.cpp itself, on models of a few thousand weights, and the file from which it reads them."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch

from pensieve.core.request import Free, Request
from pensieve.errors import UnsupportedModel, WorkerError
from pensieve.plugins.engines.llama_cpp import LlamaCpp
from pensieve.plugins.engines.weights import gguf_file, model_folder, plain_module, refuse_family
from tests.engines.small import ARCHITECTURES, ask, begun, greedy, prompt, served, setup_of

gguf = pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.parametrize("family", ["llama", "tied_llama", "gpt2"])
def test_greedy_tokens_are_those_of_plain_transformers_until_the_server_is_killed(family: str) -> None:
    """float32 file, float32 KV, no flash attention; the second of three turns is not streamed."""
    module = plain_module(setup_of(family))
    tokens = greedy(module, prompt(60), 8)
    system = begun(LlamaCpp(setup_of(family, eos=frozenset({tokens[3]}))))
    said = prompt(70)
    for turn in (1, 2, 3):
        [record] = served(system, ask(turn, "a", said, output=8, turn=turn, stream=turn != 2))
        assert list(record.token_ids) == greedy(module, said, 8)
        assert record.gpu_hit_tokens == record.history_tokens == (0 if turn == 1 else len(said) - 12 - 1)
        assert record.shared_hit_tokens == 0 and record.recomputed_tokens == 0
        assert record.cpu_hit_tokens is None
        assert (len(record.emitted_s), record.ttft_ms is None) == ((0, True) if turn == 2 else (8, False))
        assert (record.sent_bytes or 0) > 60 and (record.received_bytes or 0) > 100
        assert 0 < record.compute_ms <= record.latency_ms  # type: ignore[operator]
        said = said + record.token_ids + prompt(12, start=turn)
    free = Request(4, "b", 1, prompt(60), Free(8), stream=False)
    ignoring = Request(5, "c", 1, prompt(60), Free(8, ignore_eos=True), stream=False)
    ended, whole = served(system, free, ignoring)
    assert list(ended.token_ids) == tokens[: tokens.index(tokens[3]) + 1] and ended.finish_reason == "eos"
    assert list(whole.token_ids) == tokens
    for child in psutil.Process(system._engine._process.pid).children(recursive=True):  # type: ignore[attr-defined]
        os.kill(child.pid, signal.SIGKILL)
    system.submit(ask(6, "b", prompt(60, start=9)))
    with pytest.raises(WorkerError, match=r"(?s)ended while it served requests.*slot|does not answer"):
        system.poll(None)


@pytest.mark.parametrize(
    ("dtype", "kind", "host", "found"), [("float32", "f32", 0, 0), ("bfloat16", "f16", 2**24, 103)]
)
def test_kv_is_as_wide_as_the_models_and_what_was_pushed_out_comes_back_from_host_memory_alone(
    dtype: str, kind: str, host: int, found: int
) -> None:
    """One slot: the others wait, and a cancelled one gives it up."""
    setup = setup_of()
    per_token = setup.model.kv_bytes_per_token
    setup = replace(setup, model=replace(setup.model, dtype=dtype), host_tokens=host // per_token)
    system = begun(LlamaCpp(setup, n_parallel=1))
    settings, per_token = system.settings(), setup.model.kv_bytes_per_token
    assert settings["configured_kv_type"] == kind and f"gguf-{kind}" in settings["weights_file"] and settings["version"]
    assert (settings["n_parallel"], settings["n_ctx"], settings["gpu_bytes"]) == (1, 1024, 1024 * per_token)
    first = prompt(100)
    [one] = served(system, ask(1, "a", first, output=4))
    served(system, ask(2, "b", prompt(100, start=77), output=4))
    [back] = served(system, ask(3, "a", first + one.token_ids + prompt(5), output=4, turn=2))
    assert back.gpu_hit_tokens == found
    system.submit(ask(4, "c", prompt(60), output=900))
    system.submit(ask(5, "d", prompt(60, start=9), output=2))
    turns: dict[int, Any] = {}
    while len(turns) < 2:
        for event in system.poll(system.clock.now_s() + 0.01):
            if event.kind == "first_token" and event.request_id == 4:
                system.cancel(4, "timeout")
            if event.turn is not None:
                turns[event.request_id] = event.turn
    assert turns[4].status == "timeout" and 0 < turns[4].output_tokens < 900
    assert turns[5].status == "completed"


def test_a_prompt_beyond_its_slot_is_refused_and_an_output_beyond_it_fails() -> None:
    """n_ctx is divided among the slots: 1,024 cells in four of them."""
    system = begun(LlamaCpp(setup_of(), n_parallel=4))
    assert system.settings()["n_ctx_slot"] == 256
    for stream in (True, False):
        asked = enumerate(((300, 6), (250, 20), (60, 6)), 10 * stream)
        turns = served(system, *(ask(n, f"s{n}", prompt(size), out, stream) for n, (size, out) in asked))
        found = [(turn.status, turn.finish_reason) for turn in turns]
        assert found == [("refused", "context"), ("failed", "context"), ("completed", "length")]
        assert "256 tokens" in str(turns[0].error)


# -- weights ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "part"),
    [
        (ARCHITECTURES["opt"], "this is opt"),
        ({**ARCHITECTURES["llama"], "rope_scaling": {"rope_type": "llama3"}}, "llama3"),
        ({**ARCHITECTURES["llama"], "attention_bias": True}, "attention_bias"),
    ],
)
def test_what_cannot_be_written_is_refused(architecture: dict[str, object], part: str) -> None:
    with pytest.raises(UnsupportedModel, match=part):
        refuse_family("some", architecture)


def test_weights_are_written_once_and_again_for_other_ones() -> None:
    first = gguf_file(setup_of("llama"), "f32")
    written_at = first.stat().st_mtime_ns
    assert gguf_file(setup_of("llama"), "f32") == first and first.stat().st_mtime_ns == written_at
    others = {gguf_file(setup_of("llama", seed=4), "f32"), gguf_file(setup_of("llama"), "f16")}
    assert len(others | {first}) == 3
    folder = model_folder(setup_of("llama"))
    again = plain_module(setup_of("llama", weights=str(folder)))
    assert model_folder(setup_of("llama", weights=str(folder))) == folder
    for (name, one), two in zip(plain_module(setup_of("llama")).named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two), name
