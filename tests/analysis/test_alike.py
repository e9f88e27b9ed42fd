"""Engines that ran with other sizes, batches or threads are not compared; baselines in ours differ by design."""

from __future__ import annotations

import re
from typing import Any

import pytest

from analysis.registry import FIGURES
from analysis.sweep import Source, open_source
from pensieve.errors import MixedPanel
from pensieve.lab.results.store import ResultsStore
from tests.analysis.prefixes import FAST, prefix_sweep
from tests.results.trials import MEMORY

LIKE: dict[str, Any] = {
    "gpu_tokens": 4096, "cpu_tokens": 0, "max_batch_tokens": 512, "max_batch_requests": 4, "threads": 1, "dtype": "float32",
}  # fmt: skip
OUTSIDE = ("llama_cpp", "vllm")


def swept(budget: str | None = None, at_once: int | None = None, **of: dict[str, Any]) -> Source:
    """A sweep of these baselines, whose engines report LIKE but for what is said of them. budget: baseline.kv_budget.
    at_once: requests that the workload asks at a time."""
    store = ResultsStore(MEMORY)
    source = prefix_sweep(store, dict.fromkeys(of, FAST), blocks=["512/256"])
    for trial in source.trials:
        engine = {"_target_": "an.Engine"} if trial.baseline in OUTSIDE else None
        config = {**trial.config, "baseline": {"name": trial.baseline, "engine": engine, "kv_budget": budget}}
        facts = {**trial.engine.get("workload", {}), "requests_at_once": at_once}
        said = {**trial.engine, **LIKE, "workload": facts, **of[trial.baseline]}
        store.set_trial(trial.id, config=config, engine=said)
    return open_source(store, source.sweep.id)


def check(source: Source) -> None:
    assert all(plot.panel.provenance.mixed == () for plot in FIGURES["invalidation_cost"].plots(source))


def test_one_tier_may_have_what_two_have_together_and_what_is_not_reported_does_not_count():
    check(swept(pensieve={"gpu_tokens": 2048, "cpu_tokens": 2048}, vllm={}))
    check(swept(pensieve={}, vllm={"gpu_tokens": None, "threads": None}))
    with pytest.raises(MixedPanel, match=r"kv_tokens is 2048 \+ 1024 for pensieve and 4096 for vllm"):
        check(swept(pensieve={"gpu_tokens": 2048, "cpu_tokens": 1024}, vllm={}))


LLAMA: dict[str, Any] = {"n_parallel": 4, "configured_ram_cache_mib": 0, "kv_bytes_per_token": 16384}
"""What llama.cpp says of itself beside LIKE."""


@pytest.mark.parametrize(
    ("at_once", "budget", "ours", "outside"),
    [
        (1, "device", {"max_batch_requests": 64}, {"llama_cpp": {}}),
        (
            1, "device", {"gpu_tokens": 1408, "cpu_tokens": 4224},
            {"llama_cpp": {"gpu_tokens": 1024, "cpu_tokens": 4224, "configured_ram_cache_mib": 66}},
        ),
        (
            1, "device", {"gpu_tokens": 20448, "cpu_tokens": 54528},  # of 10,240 bytes each: 532.5 MiB
            {
                "llama_cpp": {
                    "gpu_tokens": 19456 + 512, "cpu_tokens": 54476, "configured_ram_cache_mib": 532,
                    "kv_bytes_per_token": 10240, "n_parallel": 2,
                }
            },
        ),
        (None, "device", {"cpu_tokens": 8192}, {"vllm": {}}),
        (None, "total", {"cpu_tokens": 8192}, {"vllm": {"gpu_tokens": 12288}}),
    ],
)  # fmt: skip
def test_ordinary_sweeps_draw(at_once, budget, ours, outside, drawn, tmp_path):
    """64 requests at a time where one is asked, steps of slots and of MiB, and a budget of the device alone."""
    outside = {name: LLAMA | said if name == "llama_cpp" else said for name, said in outside.items()}
    [drawing] = FIGURES["invalidation_cost"].draw(swept(budget, at_once, pensieve=ours, **outside), tmp_path)
    assert "MIXED" not in drawing.caption


TIERS = {"gpu_tokens": 4096, "cpu_tokens": 8192}


@pytest.mark.parametrize(
    ("at_once", "budget", "ours", "llama", "said"),
    [
        (1, "device", {}, {"gpu_tokens": 2048}, "kv_tokens is 4096 for pensieve and 2048 for llama_cpp"),
        (1, "device", {}, {"gpu_tokens": 3072}, "kv_tokens"),  # a whole step of four slots is no rounding
        (1, "device", TIERS, {**TIERS, "gpu_tokens": 2048, "configured_ram_cache_mib": 128}, "kv_tokens"),
        (1, "device", TIERS, {**TIERS, "cpu_tokens": 4096, "configured_ram_cache_mib": 64}, "kv_tokens"),
        (1, "total", TIERS, {}, r"kv_tokens is 4096 \+ 8192 for pensieve and 4096 for llama_cpp"),
        (1, "device", {}, {"max_batch_tokens": 64, "n_batch": 512}, "max_batch_tokens"),
        (1, "device", {}, {"n_batch": 64}, "n_batch is 512 for pensieve and 64 for llama_cpp"),
        (1, "device", {}, {"threads": 2}, "threads is 1 for pensieve and 2 for llama_cpp"),
        (1, "device", {}, {"dtype": "gguf"}, "dtype is float32 for pensieve and gguf for llama_cpp"),
        (8, "device", {"max_batch_requests": 64}, {}, "max_batch_requests is 64 for pensieve and 4 for llama_cpp"),
        (None, "device", {"max_batch_requests": 64}, {}, "max_batch_requests"),
    ],
)
def test_gross_differences_are_refused_or_said(at_once, budget, ours, llama, said, drawn, tmp_path):
    source = swept(budget, at_once, pensieve=ours, llama_cpp=LLAMA | llama)
    with pytest.raises(MixedPanel, match=f"{said}.*--allow-mixed"):
        check(source)
    [drawing] = FIGURES["invalidation_cost"].draw(
        open_source(source.store, source.sweep.id, allow_mixed=True), tmp_path
    )
    assert re.search(f"MIXED: engines of unlike settings: .*{said}", drawing.caption)
