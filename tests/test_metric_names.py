"""The registry knows every metric that can be recorded, and says once what it is."""

import ast
from pathlib import Path

import pytest

from pensieve.lab.metrics import METRICS, is_known, metric_of
from pensieve.lab.statistics import REAL

PACKAGE = Path(__file__).parents[1] / "pensieve"


def written():
    """Names of metrics that the code writes out: of a value, or of a benchmark's case."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            named = [key.value for key in node.keywords if key.arg == "metric"] if node.func.id == "Case" else []
            named += node.args[:1] if node.func.id in ("MetricValue", "_per_second") else []
            yield from (one.value for one in named if isinstance(one, ast.Constant))


def test_every_metric_that_the_code_names_is_known():
    names = set(written())
    assert len(names) > 20, "the search finds what it should"
    assert [name for name in sorted(names) if not is_known(name)] == []


def test_each_has_a_unit_a_direction_and_values_that_it_can_take():
    for metric in METRICS.values():
        assert metric.unit or metric.name == "bound", metric
        assert metric.better in ("higher", "lower", "none")
        assert metric.support.low < metric.support.high


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("ttft_ms_p99", "lower"), ("normalized_latency_ms_mean", "lower"), ("load_s", "lower"), ("miss_rate", "lower"),
        ("throughput_req_s", "higher"), ("gpu_hit_rate", "higher"), ("goodput_req_s", "higher"), ("turns", "none"),
        ("saved_s", "higher"), ("bound_recomputed_s", "lower"), ("ttft_ms_p50_turn_12", "lower"),
    ],
)  # fmt: skip
def test_which_way_is_better(name, better):
    assert metric_of(name).better == better


def test_a_name_that_only_an_older_database_has_is_taken_for_nothing():
    old = metric_of("saved_by_magic_ms")
    assert not is_known(old.name)
    assert (old.unit, old.better, old.support) == ("", "none", REAL)
