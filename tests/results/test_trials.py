"""Trials of one baseline and setting that another forward computed are told apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pensieve.lab.results.trials import listed_values, mixtures, swept_axes


def trial(number: int, forward: str | None, baseline: str = "pensieve", **config: Any) -> Any:
    """What is compared of one; as many as differ in nothing else are repeats of each other."""
    return SimpleNamespace(
        id=number, simulated=False, contended=False, flags={}, weights="random", code_hash="c", baseline=baseline,
        config={"cache": {"gpu": "512 tokens"}, "seed": number, "trial": {"retries": number}, **config},
        engine={} if forward is None else {"forward": forward}, environment={},
    )  # fmt: skip


def test_one_setting_has_one_forward() -> None:
    one, other = trial(1, "fused, packed weights"), trial(2, "fused")
    [found] = mixtures([one, other])
    assert "different forwards (fused; fused, packed weights)" in found.what
    assert "hardware.cpu_memory" in found.remedy


def test_other_baselines_and_settings_have_their_own() -> None:
    one = trial(1, "fused, packed weights")
    assert mixtures([one, trial(2, "fused, packed weights")]) == []
    assert mixtures([one, trial(2, "fused", baseline="native_pytorch")]) == []
    assert mixtures([one, trial(2, "fused", cache={"gpu": "64 tokens"})]) == []
    assert mixtures([one, trial(2, None)]) == [], "an engine that does not say it"


def test_trials_that_use_other_files_are_of_one_version_where_their_common_files_are_alike() -> None:
    def of(number: int, code: dict[str, str] | None, **config: Any) -> Any:
        one = trial(number, None, **config)
        one.code_hash, one.environment = str(number), {} if code is None else {"code": code}
        return one

    ours = of(1, {"engine.py": "a", "cache/two_tier.py": "b"})
    assert mixtures([ours, of(2, {"engine.py": "a", "cache/stateless.py": "c"})]) == []
    for other in (of(2, {"engine.py": "x", "cache/stateless.py": "c"}), of(2, None)):
        [found] = mixtures([ours, other])
        assert "different versions of the code" in found.what


def test_values_are_listed_outside_of_quotes_and_brackets() -> None:
    typed = {
        "one": "'2 GB, 4 GB'",
        "+lists": "[1,2], [3]",
        "made": "range(1,3)",
        "names": "lru,fifo",
        "hydra.verbose": "1,2",
    }
    assert swept_axes(typed) == ["lists", "made", "names"]
    assert [listed_values(typed[name]) for name in ("one", "+lists", "made")] == [
        ["'2 GB, 4 GB'"],
        ["[1,2]", "[3]"],
        None,
    ]
