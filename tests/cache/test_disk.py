"""The disk tier on simulated hardware: what is read, what it costs, and what a trial counts."""

from array import array
from typing import Any

import pytest

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.plan import StartReport
from pensieve.core.policies.lru import Lru
from pensieve.lab.compose.conf import read_option
from pensieve.lab.compose.model_files import model_config
from pensieve.plugins.tiers.disk import DiskTier
from pensieve.serve.record import TurnRecord
from pensieve.serve.server.api import server_of
from pensieve.sim.profile import Profile
from tests.invariants import check_cache
from tests.simulated import policy_context


def talk(disk: str = "16384 tokens", disk_bw: float = 3e9) -> Any:
    """Turns of eight conversations in turn on llama2_70b and an H100, and what the cache and the server have counted."""
    names = {"eviction": "lru", "scheduler": "unified", "hardware": "sim_h100", "tracking": "off"}
    fields: dict[str, Any] = {group: read_option(group, name) for group, name in names.items()}
    fields["hardware"] |= {"disk_bw": disk_bw}
    fields |= {"model": model_config("llama2_70b").model_dump(), "baseline": read_option("baseline", "pensieve")}
    turns: list[TurnRecord] = []
    with server_of(
        {**fields, "cache": {"name": "x", "gpu": "2048 tokens", "cpu": "256 tokens", "disk": disk}}
    ) as server:
        cache = server.system.engine.cache  # type: ignore[attr-defined]
        for _ in range(3):
            for name in "abcdefgh":
                out = server.generate(name, prompt_ids=list(range(400)), max_new_tokens=20, ignore_eos=True)
                check_cache(cache)
                turns.append(out.turn)
        return turns, dict(cache.counters.extra), server.get_statistics()


@pytest.mark.parametrize("disk_bw", [1e9, 3e9])
def test_history_comes_from_disk_and_first_tokens_sooner(disk_bw: float) -> None:
    with_disk, counts, statistics = talk(disk_bw=disk_bw)
    without = talk(disk="0 tokens")[0]
    assert [t.token_ids for t in with_disk] == [t.token_ids for t in without]
    both = list(zip(with_disk, without, strict=True))
    assert all((t.ttft_ms or 0) <= (u.ttft_ms or 0) * (1 + 1e-9) for t, u in both), "no turn is slower for its disk"
    later = [(t, u) for t, u in both if t.disk_hit_tokens]
    assert disk_bw == 1e9 or len(later) == 16
    for turn, other in later:
        found = (turn.gpu_hit_tokens or 0) + (turn.cpu_hit_tokens or 0) + (turn.disk_hit_tokens or 0)
        assert found + (turn.recomputed_tokens or 0) == turn.history_tokens == other.history_tokens
        assert (turn.recomputed_tokens or 0) < (other.recomputed_tokens or 0)
        assert (turn.ttft_ms or 0) < (other.ttft_ms or 0)
    found = sum(turn.disk_hit_tokens or 0 for turn in with_disk)
    assert found == 32 * counts["disk_loaded_chunks"]
    history = sum(turn.history_tokens or 0 for turn in with_disk)
    assert statistics["disk_hit_rate"] == pytest.approx(found / history)


def test_a_chunk_that_only_an_undone_turn_has_filled_goes_nowhere() -> None:
    """The last token of a turn is computed with the next one: if that is undone, its KV may be there, and does not count."""
    cache = TwoTierCache(policy=Lru(policy_context(4, 8, 0)), chunk_tokens=4, gpu_blocks=8, cpu_blocks=0)
    cost = Profile(4, {128: 0.128, 256: 0.256}, 0.001, {})
    cache.begin(cost=cost, layers=2, below=DiskTier(8), report=StartReport(0.0, 0.0))
    session = cache.open("a", 0.0)
    cache.admit(session, 0, array("i", range(7)), 0.0)
    cache.advance(session, [(0, 7)])
    session.append(7)
    cache.release(session, 1.0)
    cache.admit(session, 8, array("i", range(8, 13)), 2.0)
    cache.advance(session, [(7, 12)])
    cache.release(session, 3.0)
    cache.truncate(session, 8, computed=7)
    check_cache(cache)
    assert cache.room.drop(2, 4.0) == 2
    assert [len(move.keys) for move in cache.take_moves()] == [1] and cache.below.used == 1
    check_cache(cache)
