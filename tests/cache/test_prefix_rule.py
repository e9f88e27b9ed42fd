"""reuse=prefix: what is behind the first hole is computed again, and chunks go from the tail."""

import random
from array import array
from collections import OrderedDict
from functools import partial
from typing import Any

import pytest

from pensieve.core.policies.lru import Lru
from pensieve.core.policies.retention_value import RetentionValue
from pensieve.core.request import Length, Request
from pensieve.plugins.caches.restore import RestoringCache
from pensieve.plugins.caches.shared import SharedCache
from pensieve.serve.record import TurnRecord
from tests.simulated import TalkingEngine, make_engine, run

CHUNK = 4
MANAGERS = [RestoringCache, SharedCache]


class Dear:
    """A second a position, and nothing else takes any time."""

    def step_s(self) -> float:
        return 0.0

    def recompute_s(self, context: int) -> float:
        return float(CHUNK)

    def load_s(self) -> float:
        return 0.0


Row = tuple[str, int, int]  # conversation, new tokens, output


def rows_of(seed: int, turns: int = 60) -> list[Row]:
    rng = random.Random(seed)
    return [(rng.choice("abcdefgh"), rng.randint(1, 24), rng.randint(2, 9)) for _ in range(turns)]


def ask(engine: TalkingEngine, number: int, name: str, new: int, output: int, keep: float = 1.0) -> TurnRecord:
    session = engine.cache.sessions.get(name)
    said = session.tokens if session else array("i")
    tokens = array("i", ((7 * number + 11 * i) % 90 for i in range(new)))
    engine.submit(Request(number, name, number, said[: int(keep * len(said))] + tokens, Length(output)))
    return run(engine)[number]


def replay(rows: list[Row], keep: float = 1.0, **fields: Any) -> list[TurnRecord]:
    engine = make_engine(**fields)
    return [ask(engine, number, *row, keep) for number, row in enumerate(rows, 1)]


def found(records: list[TurnRecord]) -> list[int]:
    return [(one.gpu_hit_tokens or 0) + (one.cpu_hit_tokens or 0) for one in records]


@pytest.mark.parametrize("make", MANAGERS)
@pytest.mark.parametrize("seed", range(4))
def test_history_found_is_that_of_a_list_of_conversations(make: Any, seed: int) -> None:
    """From the rows alone: the conversation unused longest gives up its last block, whole conversations before the next."""
    rows, blocks = rows_of(seed), 80
    held: OrderedDict[str, int] = OrderedDict()  # tokens with KV, a prefix; unused longest first
    lengths: dict[str, int] = {}
    expected = []
    for name, new, output in rows:
        prompt = lengths.get(name, 0) + new
        expected.append(held.pop(name, 0))
        lengths[name] = prompt + output
        free = blocks - -(-(prompt + output - 1) // CHUNK) - sum(-(-one // CHUNK) for one in held.values())
        while free < 0:
            oldest = next(iter(held))
            held[oldest] = (held[oldest] - 1) // CHUNK * CHUNK
            free += 1
            if not held[oldest]:
                del held[oldest]
        held[name] = prompt + output - 1
    fields = {"gpu_blocks": blocks, "cpu_blocks": 0, "policy": Lru}
    records = replay(rows, cache=partial(make, reuse="prefix"), **fields)
    assert found(records) == expected and min(expected) == 0 < max(expected)


@pytest.mark.parametrize("make", MANAGERS)
@pytest.mark.parametrize(("policy", "ahead"), [(Lru, "paper"), (RetentionValue, "spare"), (Lru, "never")])
def test_what_is_left_of_a_conversation_is_a_prefix(make: Any, policy: Any, ahead: Any) -> None:
    """After each turn, on both tiers together; where holes may be, there are some."""
    holes = {"any": 0, "prefix": 0}
    for reuse in holes:
        engine = make_engine(64, 40, cache=partial(make, reuse=reuse), policy=policy, copy_ahead=ahead)
        for number, row in enumerate(rows_of(0), 1):
            ask(engine, number, *row)
            for session in engine.cache.sessions.values():
                places = engine.cache.places(session).rstrip("-")
                holes[reuse] += "-" in places
    assert holes["any"] > holes["prefix"] == 0


@pytest.mark.parametrize("make", MANAGERS)
def test_what_is_behind_a_hole_is_computed_again_and_counts_as_lost_with_it(make: Any) -> None:
    engine = make_engine(60, 60, cache=partial(make, reuse="prefix"), cost=Dear())
    ask(engine, 1, "a", 40, 5)
    tiers, node = engine.cache.tiers, engine.cache.sessions["a"].leaf
    engine.cache.facts.room_for(engine.cache.open("b", 0.0), 0.0)
    tiers._free_behind = lambda node, *run: run  # as a copy that fails, which makes a hole where nobody chose one
    tiers.drop_gpu([(node, 3, 4)])
    del tiers._free_behind
    record = ask(engine, 2, "a", 5, 3)
    assert (record.gpu_hit_tokens, record.cpu_hit_tokens, record.recomputed_tokens) == (12, 0, 44 - 12)
    assert {(one.cause, one.evicted_by) for one in record.misses} == {("evicted", "b"), ("new", None)}
    assert found([ask(engine, 3, "a", 5, 3)]) == [44 + 1 + 5 + 2]
