"""Engines that ran with other sizes, batches or threads are not compared; baselines in ours differ by design."""

from __future__ import annotations

from typing import Any

import pytest

from analysis.alike import refuse_unlike_engines
from analysis.prefix import cache_architecture, invalidation_cost, invalidation_table, prefix_overview
from analysis.sweep import Source, open_source
from pensieve.errors import MixedPanel
from pensieve.results.store import ResultsStore
from tests.analysis.prefixes import FAST, prefix_sweep
from tests.results.trials import MEMORY

LIKE: dict[str, Any] = {
    "gpu_tokens": 4096, "cpu_tokens": 0, "max_batch_tokens": 512, "max_batch_requests": 4, "threads": 1, "dtype": "float32",
}  # fmt: skip
OUTSIDE = ("llama_cpp", "vllm")


def swept(**of: dict[str, Any]) -> Source:
    """A sweep of these baselines, whose engines report LIKE but for what is said of them."""
    store = ResultsStore(MEMORY)
    source = prefix_sweep(store, dict.fromkeys(of, FAST), blocks=["512/256"])
    for trial in source.trials:
        engine = {"_target_": "an.Engine"} if trial.baseline in OUTSIDE else None
        config = {**trial.config, "baseline": {"name": trial.baseline, "engine": engine}}
        store.set_trial(trial.id, config=config, engine={**trial.engine, **LIKE, **of[trial.baseline]})
    return open_source(store, source.sweep.id)


def check(source: Source) -> None:
    for panel in source.panels():
        refuse_unlike_engines(panel.cells)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"gpu_tokens": 1024}, r"kv_tokens is 4096 for pensieve and 1024 for llama_cpp"),
        ({"max_batch_tokens": 64}, "max_batch_tokens is 512 for pensieve and 64 for llama_cpp"),
        ({"n_batch": 2048}, "n_batch is 512 for pensieve and 2048 for llama_cpp"),
        ({"max_batch_requests": 1}, "max_batch_requests is 4 for pensieve and 1 for llama_cpp"),
        ({"threads": 2}, "threads is 1 for pensieve and 2 for llama_cpp"),
        ({"dtype": "gguf"}, "dtype is float32 for pensieve and gguf for llama_cpp"),
    ],
)
def test_an_engine_of_unlike_settings_is_refused_by_name(changed, said):
    with pytest.raises(MixedPanel, match=f"{said}.*scheduler.max_batch_tokens"):
        check(swept(pensieve={}, llama_cpp=changed))
    check(swept(pensieve=changed, gpu_only={}))


@pytest.mark.parametrize("figure", [invalidation_table, prefix_overview, cache_architecture, invalidation_cost])
def test_figures_that_compare_engines_ask(figure, drawn, tmp_path):
    with pytest.raises(MixedPanel, match="threads"):
        figure.draw(swept(pensieve={}, llama_cpp={"threads": 2}), tmp_path)
    figure.draw(swept(pensieve={}, llama_cpp={}), tmp_path)


def test_one_tier_may_have_what_two_have_together_and_what_is_not_reported_does_not_count():
    check(swept(pensieve={"gpu_tokens": 2048, "cpu_tokens": 2048}, vllm={}))
    check(swept(pensieve={}, vllm={"gpu_tokens": None, "threads": None}))
    with pytest.raises(MixedPanel, match="kv_tokens is 6144 for pensieve and 4096 for vllm"):
        check(swept(pensieve={"cpu_tokens": 2048}, vllm={}))
