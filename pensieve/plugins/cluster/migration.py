"""KV that goes with a conversation from one replica to another, priced against computing it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.engine import Engine
from pensieve.core.machine import CostModel
from pensieve.core.request import TokenArray
from pensieve.core.session import Session, View, chunks_of, common_prefix

When = Literal["never", "cheaper", "always"]


@dataclass(frozen=True, slots=True)
class Network:
    """One interface a replica, each way on its own. gbps: 10^9 bit/s. latency_s: one way."""

    gbps: float
    latency_s: float

    def seconds(self, count: int) -> float:
        """Of so many bytes, while nothing else is on the way."""
        return self.latency_s + count * 8 / (self.gbps * 1e9)


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """lengths: of each chunk of `tokens`, the leading offsets whose KV is sent. count: of all of them. source, target:
    replicas."""

    tokens: TokenArray[int]
    lengths: tuple[int, ...]
    count: int
    source: int
    target: int
    arrives_ns: int


def lacking(held: Session, there: Session | None, tokens: TokenArray[int], chunk_tokens: int) -> tuple[int, ...]:
    """By chunk of `tokens`, the leading offsets that `held` has KV of and `there` has less of."""
    same = common_prefix(held.tokens, tokens)
    theirs = 0 if there is None else common_prefix(there.tokens, tokens)
    found = []
    for index, chunk in enumerate(held.chunks):
        first = index * chunk_tokens
        length = min(chunk.resident_len, same - first)
        known = there.chunks[index].resident_len if there is not None and index < len(there.chunks) else 0
        found.append(length if length > max(0, min(known, theirs - first)) else 0)
    return tuple(found)


def computing_s(cost: CostModel, lengths: tuple[int, ...], chunk_tokens: int) -> float:
    """What it takes to compute the KV of these chunks again, as parts of a longer prefill."""
    chunks = ((index * chunk_tokens, length) for index, length in enumerate(lengths, start=1) if length)
    return sum(cost.recompute_s(end) * length / chunk_tokens for end, length in chunks)


class Migration:
    """Decides what is sent, and when it arrives. A replica sends, and receives, one transfer after the other.

    when: `cheaper` where the way, the wait for both interfaces and the load to the GPU take less than computing would, by
    the cost model; `always` whatever they take.
    """

    def __init__(self, when: When, network: Network) -> None:
        self.when, self._network = when, network
        self._on_the_way: list[KvTransfer] = []  # and those that have arrived since the last one was sent

    def transfer(
        self,
        tokens: TokenArray[int],
        lengths: tuple[int, ...],
        cost: CostModel,
        *,
        chunk_tokens: int,
        bytes_per_token: int,
        source: int,
        target: int,
        now_ns: int,
    ) -> KvTransfer | None:
        """What is sent of these chunks, all or nothing; the interfaces are taken for it."""
        count = sum(lengths)
        if not count:
            return None
        self._on_the_way = [one for one in self._on_the_way if one.arrives_ns > now_ns]
        taken = (one.arrives_ns for one in self._on_the_way if one.source == source or one.target == target)
        begins = max((now_ns, *taken))
        arrives = begins + round(self._network.seconds(count * bytes_per_token) * 1e9)
        if self.when == "cheaper":
            loading_s = cost.load_s() * sum(map(bool, lengths))
            if (arrives - now_ns) / 1e9 + loading_s >= computing_s(cost, lengths, chunk_tokens):
                return None
        transfer = KvTransfer(tokens, lengths, count, source, target, arrives)
        self._on_the_way.append(transfer)
        return transfer


def receive(engine: Engine, name: str, tenant: str, tokens: TokenArray[int], lengths: Sequence[int]) -> int:
    """Have an engine take over KV of a conversation. lengths: by chunk, the leading offsets that came. Returns the number of
    tokens whose KV is taken: 0 while the conversation has a request under way, and where no CPU tier keeps whole chunks."""
    if engine.sessions.has_request(name):
        return 0
    now_ns, cache = engine.clock.now_ns(), engine.cache
    engine.facts.at(now_ns)
    session, taken = cache.open(name, now_ns / 1e9, tenant), 0
    if isinstance(cache, TwoTierCache) and not cache.room.frees:
        taken = _store(cache, session, tokens, lengths, now_ns / 1e9)
    engine.sessions.rests(session, now_ns)
    return taken


def _store(cache: TwoTierCache, session: Session, tokens: TokenArray[int], lengths: Sequence[int], now_s: float) -> int:
    """Store the KV in CPU blocks that are free, or of duplicates, or of the policy's victims. Where these do not suffice, the
    last chunks get them, which take longest to compute."""
    size, tiers = cache.chunk_tokens, cache.tiers
    chunks = session.chunks
    keep = common_prefix(session.tokens, tokens)
    for index, length in enumerate(lengths[: len(chunks)]):
        if length > chunks[index].resident_len > 0:
            keep = min(keep, index * size)  # what is there of that chunk gives way to more of it
    cache.facts.room_for(session, now_s)
    cache.truncate(session, keep)
    session.extend(tokens[keep:])
    session.advance(len(tokens) - 1)
    session.leaf.chunks.add(chunks_of(len(tokens), size) - session.leaf.start - len(session.leaf.chunks))
    chunks = session.chunks
    wanted = [index for index, length in enumerate(lengths) if length and not chunks[index].resident_len]
    tiers.free_duplicates(max(0, len(wanted) - tiers.cpu.free))
    lacking = max(0, len(wanted) - tiers.cpu.free)
    others = cache.room.victims_of_others(tiers.cpu_only, session, View.CPU_ONLY, lacking, now_s)
    cache.room.give_up(others, tiers.drop_cpu)
    taken = wanted[max(0, len(wanted) - tiers.cpu.free) :]
    for index, block in zip(taken, tiers.cpu.allocate(len(taken), session.number), strict=True):
        for node, place, _ in session.in_nodes([(index, index + 1)]):
            node.chunks.cpu[place], node.chunks.cpu_len[place] = block, lengths[index]
        cache.facts.not_lost(session, index, index + 1)
    for node in session.nodes():
        tiers.update(node, 0, len(node.chunks))
    cache.meet(session, session.computed)
    return sum(lengths[index] for index in taken)
