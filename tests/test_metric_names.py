"""The registry knows every metric that can be recorded, and says once what it is."""

import ast
from pathlib import Path

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


def test_every_metric_that_the_code_names_is_known_and_what_only_an_older_database_has_is_taken_for_nothing():
    names = set(written())
    assert len(names) > 20, "the search finds what it should"
    assert [name for name in sorted(names) if not is_known(name)] == []
    assert all(one.unit or one.name == "bound" for one in METRICS.values())
    assert metric_of("ttft_ms_p50_turn_12").better == "lower"
    old = metric_of("saved_by_magic_ms")
    assert not is_known(old.name) and (old.unit, old.better, old.support) == ("", "none", REAL)
