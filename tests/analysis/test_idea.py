import pytest

from analysis import idea
from pensieve.errors import MissingSeries
from tests.analysis.sweeps import answered, fill


def turns_of(at, seed):
    """Three conversations: `plain` is always on the GPU, `mixed` meets all three, `broken` ends early."""
    if at["baseline"] == "stateless":
        found = [answered(s, n, 5.0, history=100 * (n - 1)) for s in ("plain", "mixed") for n in (1, 2, 3, 4)]
        return [*found, answered("broken", 1, 5.0, history=0)]
    plain = [answered("plain", n, 5.0, history=100 * (n - 1), gpu=100 * (n - 1)) for n in (1, 2, 3, 4)]
    mixed = [
        answered("mixed", 1, 5.0),
        answered("mixed", 4, 5.0, history=300),  # recorded before the second: rows are not in the order of turns
        answered("mixed", 2, 5.0, history=100, gpu=100),
        answered("mixed", 3, 5.0, history=200, gpu=50, cpu=150),
    ]
    broken = [
        answered("broken", 1, 5.0, history=9000, gpu=3000, cpu=3000),
        answered("broken", 2, None, status="failed"),
    ]
    return [answered("warmup-0", 1, 5.0, phase="warmup", history=900), *plain, *broken, *mixed]


def test_each_bar_is_a_prompt_and_its_parts_are_the_rows(store, drawn, tmp_path):
    source = fill(store, {"baseline": ["pensieve", "stateless"]}, turns_of)
    idea.draw(store, source.sweep.id, tmp_path / "idea.png")
    bars = drawn["idea"].bars

    def lengths(baseline, part):
        return [bars[f"{baseline}/turn {turn}/{part}"][1] for turn in (1, 2, 3, 4)]

    assert lengths("pensieve", "GPU hit") == [0, 100, 50, 0]
    assert lengths("pensieve", "CPU hit") == [0, 0, 150, 0]
    assert lengths("pensieve", "recomputed") == [0, 0, 0, 300]
    assert lengths("stateless", "recomputed") == [0, 100, 200, 300]
    for baseline in ("pensieve", "stateless"):
        new = [bars[f"{baseline}/turn {turn}/new"] for turn in (1, 2, 3, 4)]
        assert new == [(0, 10), (100, 10), (200, 10), (300, 10)]
    assert any("'mixed'" in text and "not a typical one" in text for text in drawn["idea"].texts)
    assert drawn["idea"].clipped == []


def test_what_came_from_disk_is_a_part_of_its_own(store, drawn, tmp_path):
    def turns(at, seed):
        disk = 80 if at["baseline"] == "pensieve" else 0
        return [answered("a", 1, 5.0), answered("a", 2, 5.0, history=100, gpu=disk // 8, disk_hit_tokens=disk)]

    source = fill(store, {"baseline": ["pensieve", "stateless"]}, turns)
    idea.draw(store, source.sweep.id, tmp_path / "idea.png")
    bars = drawn["idea"].bars
    assert bars["pensieve/turn 2/disk hit"] == (10, 80)
    assert bars["pensieve/turn 2/recomputed"] == (90, 10)
    assert bars["stateless/turn 2/recomputed"] == (0, 100)


def test_without_one_of_the_two_it_says_which_and_how(store, tmp_path):
    source = fill(store, {"baseline": ["pensieve"]}, turns_of)
    with pytest.raises(MissingSeries, match=r"no completed trial of stateless; run `python runners/run\.py -m"):
        idea.draw(store, source.sweep.id, tmp_path / "idea.png")
