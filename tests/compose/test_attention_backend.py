from __future__ import annotations

from typing import Any

import pytest

from pensieve.device.asked import ModelAsked
from pensieve.errors import ConfigError, EngineMissing
from pensieve.lab.compose import build_system, plan_trial, resolved
from pensieve.lab.compose.preflight import preflight
from pensieve.lab.results.identity import config_hash
from tests.composed import checked, composed


def test_it_is_part_of_what_is_measured() -> None:
    plain, chosen = (config_hash(resolved(composed(*typed))) for typed in ((), ("attention_backend=reference",)))
    assert plain != chosen


def test_an_unknown_one_is_one_sentence() -> None:
    with pytest.raises(
        ConfigError, match="attention_backend='flash' cannot be used: Input should be 'auto', 'reference'"
    ):
        checked("attention_backend=flash")


def test_one_that_cannot_run_here_is_refused_before_there_is_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(EngineMissing, match="attention_backend=triton needs"):
        preflight(plan_trial(checked("hardware=cpu", "attention_backend=triton")))


def test_simulated_hardware_ignores_it() -> None:
    system = build_system(plan_trial(checked("attention_backend=flashinfer")))
    system.start()
    system.close()


def test_the_model_is_loaded_with_it_the_size_of_the_blocks_and_the_memory_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, Any] = {}

    def load(asked: ModelAsked) -> None:
        seen.update(attention=asked.attention, chunk_tokens=asked.chunk_tokens, memory_bytes=asked.memory_bytes)
        raise EngineMissing("enough seen")

    monkeypatch.setattr("pensieve.device.model.load_model", load)
    with pytest.raises(EngineMissing, match="enough seen"):
        build_system(plan_trial(checked("hardware=cpu", "attention_backend=varlen", "cache.chunk_tokens=64")))
    assert (seen["attention"], seen["chunk_tokens"], seen["memory_bytes"]) == ("varlen", 64, None)
    with pytest.raises(EngineMissing, match="enough seen"):
        build_system(plan := plan_trial(checked("hardware=cpu", "hardware.cpu_memory=2GiB")))
    tiers = (plan.gpu_blocks + plan.cpu_blocks) * plan.block_bytes
    assert plan.gpu_blocks and plan.cpu_blocks
    assert seen["memory_bytes"] == 2 * 2**30 - tiers, "what full tiers leave"


def test_one_that_cannot_run_here_is_one_sentence() -> None:
    with pytest.raises(EngineMissing, match="attention_backend=varlen runs on CUDA only"):
        build_system(plan_trial(checked("hardware=cpu", "attention_backend=varlen")))
