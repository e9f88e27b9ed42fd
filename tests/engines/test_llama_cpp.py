"""llama.cpp itself, on models of a few thousand weights, and the file from which it reads them."""

from __future__ import annotations

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


def opened(family: str = "llama", setup: dict[str, Any] | None = None, **fields: Any) -> Any:
    return begun(LlamaCpp(setup_of(family, **(setup or {})), **fields))


@pytest.mark.parametrize("family", ["llama", "tied_llama", "gpt2"])
def test_greedy_tokens_are_those_of_plain_transformers_over_three_turns(family: str) -> None:
    """float32 file, float32 KV, no flash attention; the second turn is not streamed."""
    module, system = plain_module(setup_of(family)), opened(family)
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


@pytest.mark.parametrize(("dtype", "kind"), [("float32", "f32"), ("bfloat16", "f16")])
def test_weights_and_kv_are_as_wide_as_the_models_and_batches_the_schedulers(dtype: str, kind: str) -> None:
    setup = setup_of()
    setup = replace(setup, model=replace(setup.model, dtype=dtype), host_tokens=2**21 // setup.model.kv_bytes_per_token)
    system = begun(LlamaCpp(setup, n_parallel=2))
    settings, per_token = system.settings(), setup.model.kv_bytes_per_token
    assert settings["configured_kv_type"] == kind and f"gguf-{kind}" in settings["weights_file"]
    assert (settings["n_parallel"], settings["n_ctx"], settings["gpu_bytes"]) == (2, 1024, 1024 * per_token)
    [turn] = served(system, ask(1, "a", prompt(60)))
    assert turn.status == "completed" and settings["version"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_prompt_beyond_its_slot_is_refused_and_an_output_beyond_it_fails(stream: bool) -> None:
    """n_ctx is divided among the slots: 1,024 cells in four of them."""
    system = opened(n_parallel=4)
    assert system.settings()["n_ctx_slot"] == 256
    asked = ((300, 6), (250, 20), (60, 6))
    turns = served(system, *(ask(n, f"s{n}", prompt(size), out, stream) for n, (size, out) in enumerate(asked)))
    found = [(turn.status, turn.finish_reason) for turn in turns]
    assert found == [("refused", "context"), ("failed", "context"), ("completed", "length")]
    assert "256 tokens" in str(turns[0].error)


def test_a_conversation_pushed_out_of_its_slot_comes_back_from_host_memory() -> None:
    found = {}
    for host in (0, 50_000):
        system = opened(setup={"host_tokens": host}, n_parallel=1)
        first = prompt(100)
        [one] = served(system, ask(1, "a", first, output=4))
        served(system, ask(2, "b", prompt(100, start=77), output=4))
        [back] = served(system, ask(3, "a", first + one.token_ids + prompt(5), output=4, turn=2))
        found[host] = back.gpu_hit_tokens
        system.close()
    assert found == {0: 0, 50_000: 103}


def test_requests_wait_their_turn_and_a_cancelled_one_ends() -> None:
    system = opened(n_parallel=1)
    system.submit(ask(1, "a", prompt(60), output=900))
    system.submit(ask(2, "b", prompt(60, start=9), output=2))
    turns: dict[int, Any] = {}
    while len(turns) < 2:
        for event in system.poll(system.clock.now_s() + 0.01):
            if event.kind == "first_token" and event.request_id == 1:
                system.cancel(1, "timeout")
            if event.turn is not None:
                turns[event.request_id] = event.turn
    assert turns[1].status == "timeout" and 0 < turns[1].output_tokens < 900
    assert turns[2].status == "completed"


def test_a_free_output_ends_with_its_end_of_sequence() -> None:
    tokens = greedy(plain_module(setup_of("llama")), prompt(60), 8)
    system = opened(setup={"eos": frozenset({tokens[3]})})
    free = Request(1, "a", 1, prompt(60), Free(8), stream=False)
    ignoring = Request(2, "b", 1, prompt(60), Free(8, ignore_eos=True), stream=False)
    ended, whole = served(system, free, ignoring)
    assert list(ended.token_ids) == tokens[: tokens.index(tokens[3]) + 1] and ended.finish_reason == "eos"
    assert list(whole.token_ids) == tokens


def test_a_server_that_is_killed_fails_the_trial_with_its_log() -> None:
    system = opened()
    [before] = served(system, ask(1, "a", prompt(60)))
    assert before.status == "completed"
    for child in psutil.Process(system._engine._process.pid).children(recursive=True):
        os.kill(child.pid, signal.SIGKILL)
    system.submit(ask(2, "b", prompt(60, start=9)))
    with pytest.raises(WorkerError, match=r"(?s)ended while it served requests.*listening|does not answer"):
        system.poll(None)


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
