"""The link between the tiers against a second computation of it, a nanosecond at a time."""

from __future__ import annotations

import random

import pytest

from pensieve.sim.worker import DuplexLink, UnderWay

Asked = tuple[str, int, int, bool]  # way, when, what it takes alone, after the loads


def performed(asked: list[Asked], penalty: float) -> list[UnderWay]:
    link = DuplexLink(penalty)
    found = []
    for way, at, work, after in asked:
        if way == "in":
            found.append(link.copy_in((len(found),), frozenset({1}), work, at))
        else:
            found.append(link.copy_out((len(found),), 1, work, at, after_loads=after))
    return found


def by_the_nanosecond(asked: list[Asked], penalty: float) -> list[int]:
    """When each is done. What waits for the loads waits for those that were asked for by then."""
    left = [float(work) for _, _, work, _ in asked]
    ends = [0] * len(asked)
    now = 0
    while any(one > 0 for one in left):
        heads = []
        for way in ("in", "out"):
            queue = [i for i, (own, at, _, _) in enumerate(asked) if own == way and left[i] > 0 and at <= now]
            if queue:
                waits = way == "out" and asked[queue[0]][3]
                before = [i for i in range(queue[0]) if asked[i][0] == "in" and left[i] > 0]
                if not (waits and before):
                    heads.append(queue[0])
        for head in heads:
            left[head] -= 1 - penalty if len(heads) == 2 else 1
            if left[head] <= 1e-9:
                left[head], ends[head] = 0.0, now + 1
        now += 1
    return ends


def test_copies_of_different_plans_slow_each_other_while_they_overlap() -> None:
    """A swap-out of 100; 40 later a swap-in of 48: at 0.8 of the rate it takes 60, in which 48 of the other's are done."""
    out, into = performed([("out", 0, 100, True), ("in", 40, 48, False)], 0.2)
    assert (into.begins_ns, into.ends_ns) == (40, 100)
    assert (out.begins_ns, out.ends_ns) == (0, 112)


@pytest.mark.parametrize("penalty", [0.0, 0.2, 0.5])
def test_random_copies_end_when_a_second_computation_says(penalty: float) -> None:
    for seed in range(60):
        rng = random.Random(seed)
        at, asked = 0, list[Asked]()
        for _ in range(rng.randint(1, 8)):
            at += rng.choice([0, 0, rng.randint(1, 300)])
            asked.append((rng.choice(["in", "out"]), at, rng.randint(1, 200), rng.random() < 0.5))
        ends = [one.ends_ns for one in performed(asked, penalty)]
        assert ends == pytest.approx(by_the_nanosecond(asked, penalty), abs=2 * len(asked)), (seed, asked)
