"""The replay of traffic that `pensieve record` took of vLLM's server finds what the server said: calibrate.py, as kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.engines import first_tokens
from tests.engines.calibrate import HOST, check, kept, loads, name, predicted, predictions, traffic
from tests.engines.offload_loads import Load

AT_AN_EDGE = {"strict; 4 at once; 64 + 90 blocks": 11.0, "weka; 4 at once; 64 + 0 blocks": 1.5}
"""Points: where lru finds all or nothing of a conversation, the order in which replies end decides (docs/advise.md)."""


@pytest.mark.parametrize("load", loads(), ids=name)
def test_advise_replays_what_the_server_found(load: Load, tmp_path: Path) -> None:
    traffic(kept()[name(load)], tmp_path / "traffic.parquet")
    found = check(load, tmp_path / "traffic.parquet")
    if load.at_once == 1:
        assert not found.requests and found.engine > 0
    assert abs(found.points) <= AT_AN_EDGE.get(name(load), 1.0)


def test_another_size_of_either_tier_is_told_apart(tmp_path: Path) -> None:
    load = loads()[0]
    traffic(kept()[name(load)], tmp_path / "traffic.parquet")
    for other in (replace(load, device=load.device // 2), replace(load, host=HOST // 2), replace(load, host=0)):
        assert check(other, tmp_path / "traffic.parquet").requests


@pytest.mark.parametrize(("source", "load"), [pytest.param(*one, id=one[1].name) for one in predictions()])
def test_a_recording_of_one_size_predicts_others_and_other_orders(source: str, load: Load, tmp_path: Path) -> None:
    assert not predicted(source, load, tmp_path).requests


MISSED = {"64 + 96, arc": 0.18, "48 + 64, lru": 0.33}
"""Share by which the prediction is too fast there (docs/advise.md)."""


def test_times_to_first_token_are_predicted_from_a_recording_without_a_cpu_tier() -> None:
    source, *others = first_tokens.SIZES
    for size, one in first_tokens.predictions(source, others):
        assert abs(one.points) <= 1.0 and abs(one.slower) <= MISSED.get(size.name, 0.15), size.name
