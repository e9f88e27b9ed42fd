"""Pensieve's cache with equal beginnings of conversations kept once: a prefix tree of nodes, in tiers, with holes.

docs/architecture.md shows the tree, and what becomes of its nodes. Full chunks are known by content: a chained hash of the
tenant and of all tokens up to their end (HashChain). Where a prompt diverges from a node, that is split: columns of records
are cut, blocks stay where they are, so the table of a request that runs stays true.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any, Literal

from pensieve.core.cache.heaps import HeapIndex
from pensieve.core.cache.tiers import Tiers
from pensieve.core.cache.two_tier import TwoTierRoom
from pensieve.core.cache.victims import VictimIndex
from pensieve.core.policies.base import EvictionPolicy, Scores
from pensieve.core.request import TokenArray
from pensieve.core.session import (
    NO_BLOCK,
    BlockHash,
    Chunks,
    HashChain,
    Node,
    Session,
    Stem,
    View,
    chunks_of,
    common_prefix,
)
from pensieve.plugins.caches.prefix_rule import PrefixTiers, TailIndex
from pensieve.plugins.caches.restore import RestoreMode, RestoringCache, Reuse

Share = Literal["off", "within-tenant"]


class PrefixTree:
    """Which node has which content, and which session."""

    def __init__(self, chunk_tokens: int) -> None:
        self._size = chunk_tokens
        self._roots: dict[BlockHash, Node] = {}
        self._numbers = 0

    def number(self) -> int:
        """Of a new node: leaves have those of their sessions."""
        self._numbers -= 1
        return self._numbers

    def after(self, node: Stem | None) -> dict[BlockHash, Node]:
        """The nodes that follow this one, by the name of their first chunk; None: those that begin conversations."""
        return self._roots if node is None else node.children

    def names(self, node: Node) -> list[BlockHash]:
        """Of the chunks by which others can find it."""
        if isinstance(node, Stem):
            return node.names
        return node.session.named((node.start + node.findable) * self._size, self._size)[node.start :]

    def matches(self, names: list[BlockHash]) -> list[tuple[Node, int]]:
        """The nodes that begin as these full chunks of a prompt do, and how many chunks of each; ends where it diverges."""
        found: list[tuple[Node, int]] = []
        node, start = None, 0
        while start < len(names) and (other := self.after(node).get(names[start])) is not None:
            theirs = self.names(other)
            count = common_prefix(names[start : start + len(theirs)], theirs)
            found.append((other, count))
            start += count
            if not isinstance(other, Stem) or count < len(theirs):
                break
            node = other
        return found

    def stem(self, node: Node, count: int) -> Stem:
        """Make a stem of a node's first `count` chunks, which precedes the rest of it. Their records are still the node's."""
        names = self.names(node)
        stem = Stem(self.number(), node.session, names[:count])
        stem.parent = node.parent
        self.after(node.parent)[names[0]] = stem
        node.parent = stem
        if isinstance(node, Stem):
            stem.holders, node.names = dict(node.holders), names[count:]
        else:
            stem.holders, node.findable = {node.session.number: node.session}, node.findable - count
            node.key = names[count] if node.findable else None
        if names[count:]:
            stem.children[names[count]] = node
        return stem

    def show(self, leaf: Node, names: list[BlockHash]) -> None:
        """Let others find the leaf's first chunks, which have these names, and no others."""
        key = names[0] if names else None
        if leaf.key != key:
            self.hide(leaf)
            if key is not None:
                self.after(leaf.parent)[key] = leaf
        leaf.key, leaf.findable = key, len(names)

    def hide(self, leaf: Node) -> None:
        if leaf.key is not None:
            del self.after(leaf.parent)[leaf.key]
        leaf.key, leaf.findable = None, 0

    def check(self, sessions: dict[str, Session]) -> None:
        known: dict[int, Node] = {}
        held: dict[int, set[int]] = {}
        for session in sessions.values():
            nodes = session.nodes()
            stop = 0
            for node in nodes:
                assert node.start == stop, "chunks are in no node, or in two"
                stop += len(node.chunks)
                known[node.number] = node
                held.setdefault(node.number, set()).add(session.number)
            assert not session.leaf.findable or session.leaf.key is not None
            assert session.leaf.findable <= len(session.leaf.chunks)
            own = session.named(len(session.tokens), self._size)
            for stem in session.stems():
                assert own[stem.start : stem.stop] == stem.names, "a session has other content than its node"
                assert len(stem.chunks) == len(stem.names)
        names: set[BlockHash] = set()
        for node in known.values():
            if isinstance(node, Stem):
                assert set(node.holders) == held[node.number]
                assert node.session is next(reversed(node.holders.values()))
                assert node.waiting == sum(bool(session.waiting) for session in node.holders.values())
            own = self.names(node)
            assert not names & set(own), "the same content is in two nodes"
            names.update(own)
            assert not own or self.after(node.parent)[own[0]] is node
        listed = sum(len(node.children) for node in known.values() if isinstance(node, Stem)) + len(self._roots)
        assert listed == sum(bool(self.names(node)) for node in known.values()), "a node that nobody has is found"


_HOLDERS = 64  # sessions that say what a stem is worth: those before them add next to nothing


class SharedIndex(HeapIndex):
    """Several sessions say what a stem is worth: no less than its entry in a heap, which stands for the last one."""

    def _decides(self, node: Node) -> bool:
        return self._policy.together is None or not isinstance(node, Stem) or len(node.holders) < 2

    def _scores(self, node: Node, first: int, last: int, now_s: float) -> Scores:
        if self._policy.together is None or self._decides(node):
            return super()._scores(node, first, last, now_s)
        assert isinstance(node, Stem)
        return self._policy.together(tuple(islice(reversed(node.holders.values()), _HOLDERS)), first, last, now_s)


class SharedTiers(Tiers):
    """Tiers whose nodes are split, and take over what others have of the same content."""

    def _victims(self, policy: EvictionPolicy, view: View) -> VictimIndex:
        return SharedIndex(policy, view)

    def split(self, node: Node, upper: Node, count: int) -> None:
        """Move the node's first `count` chunks to a new node that precedes it; blocks and copies under way stay as they
        are."""
        for victims in self._index.values():
            victims.remove(node)
        duplicates = [index for index in range(len(node.chunks)) if self.duplicates.pop((node.number, index), None)]
        upper.start, upper.running, upper.waiting = node.start, node.running, node.waiting
        for name in Chunks.__slots__:
            column = getattr(node.chunks, name)
            setattr(upper.chunks, name, column[:count])
            del column[:count]
        node.start += count
        self._split_copies(node, upper, count)
        for index in duplicates:
            part, place = (upper, index) if index < count else (node, index - count)
            self.duplicates[part.number, place] = part
        for part in (upper, node):
            for view, victims in self._index.items():
                victims.changed(part, part.chunks.view.count(view))

    def _split_copies(self, node: Node, upper: Node, count: int) -> None:
        """The first `count` chunks of a node have become those of another one."""
        copies = self.copies
        for moved in copies.by_node.pop(node.number, ()):
            moves, parts = copies.open_moves[moved.ticket], []
            place = min(max(count - moved.first, 0), len(moved.gpu))
            behind = moved.first + place - count
            for part, first, some in ((upper, moved.first, slice(place)), (node, behind, slice(place, None))):
                if moved.gpu[some]:
                    columns = {name: getattr(moved, name)[some] for name in ("gpu", "cpu", "lengths", "fates")}
                    parts.append(replace(moved, node=part, first=first, **columns))
            at = moves.index(moved)
            moves[at : at + 1] = parts
            for each in parts:
                copies.by_node.setdefault(each.node.number, []).append(each)

    def fill(self, target: Node, source: Node) -> None:
        """Have idle chunks without KV take over the blocks that another node has for the same content."""
        old, new = source.chunks, target.chunks
        for index in range(0 if target.running else min(len(old), len(new))):
            there = new.gpu[index] != NO_BLOCK or new.cpu[index] != NO_BLOCK or new.copying[index]
            if not there and old[index].resident_len and not old.copying[index]:
                new.take(index, old)
                self._set_views(source, index, bytes(1))
                self.update(target, index, index + 1)


class SharedTailIndex(TailIndex, SharedIndex):
    """The same, from the tail."""


class SharedPrefixTiers(PrefixTiers, SharedTiers):
    """The same, of which a prefix alone is of use."""

    def _victims(self, policy: EvictionPolicy, view: View) -> VictimIndex:
        return SharedTailIndex(policy, view)


class SharedRoom(TwoTierRoom):
    """As TwoTierRoom, where what the tree has of a prompt needs no block."""

    shares = True

    def __init__(self, cache: SharedCache) -> None:
        super().__init__(cache.tiers)
        self._tree = cache.tree
        self._asked: tuple[TokenArray[int], str, list[BlockHash]] | None = None  # of the head of the queue

    def lacking(self, session: Session, keep: int, prompt: TokenArray[int]) -> int:
        """The last chunk of what the session has, partly filled, counts as one to be taken: the tree may have all of it."""
        size, had, spare = self.tiers.chunk_tokens, 0, 0
        matched = self._matched(session, prompt)
        for node, count in matched:
            had += count - node.chunks.gpu[:count].count(NO_BLOCK)
            spare += self._evictable(node, 0, count)
        if self.tiers.copies.in_flight:
            kept = {node.number: count for node, count in matched}
            for node in session.nodes():
                spare += self._evictable(node, kept.get(node.number, 0), len(node.chunks))
        return chunks_of(len(prompt) + 1, size) - had + spare - self.available

    def awaits(self, session: Session, prompt: TokenArray[int]) -> bool:
        full = self.tiers.chunk_tokens
        for node, count in self._matched(session, prompt):
            if node.running and any(length < full for length in node.chunks.gpu_len[:count]):
                return True
        return False

    def _evictable(self, node: Node, start: int, stop: int) -> int:
        """Count its chunks that are among those available."""
        view = node.chunks.view
        return view.count(View.CLEAN, start, stop) + (0 if self.cpu_blocks else view.count(View.DIRTY, start, stop))

    def _matched(self, session: Session, prompt: TokenArray[int]) -> list[tuple[Node, int]]:
        """What the tree has of a prompt's full chunks; its last token is computed in any case."""
        size, asked = self.tiers.chunk_tokens, self._asked
        if prompt is session.tokens:
            return self._tree.matches(session.named(len(prompt) - 1, size))
        if asked is None or asked[0] is not prompt or asked[1] != session.tenant:
            names = HashChain(size, session.tenant).upto(prompt, len(prompt) - 1)
            self._asked = asked = prompt, session.tenant, names
        return self._tree.matches(asked[2])


class SharedCache(RestoringCache):
    """Pensieve's cache in which sessions of one tenant have equal beginnings in common.

    share: off is RestoringCache. A conversation that is forgotten leaves its nodes; what no other has goes with it.
    """

    tiers: SharedTiers

    def __init__(
        self, *, share: Share = "within-tenant", restore: RestoreMode = "load", reuse: Reuse = "any", **others: Any
    ) -> None:
        super().__init__(restore=restore, reuse=reuse, **others)
        self.tree = PrefixTree(self.chunk_tokens)
        self.tiers.shares = share != "off"
        if self.tiers.shares:
            self.room = SharedRoom(self)

    def _tiers(self, *given: Any) -> Tiers:
        return (SharedPrefixTiers if self.reuse == "prefix" else SharedTiers)(*given)

    # -- content ------------------------------------------------------------------------------------------------------

    def meet(self, session: Session, length: int) -> None:
        """Have the session's leaf be what it alone has: full chunks in [0, length) that the tree has too are the tree's from
        now on, and others find the rest."""
        if not self.tiers.shares:
            return
        names, leaf = session.named(length, self.chunk_tokens), session.leaf
        while leaf.start < len(names):
            other = self.tree.after(leaf.parent).get(names[leaf.start])
            if other is None or other is leaf:
                break
            self.tree.hide(leaf)
            theirs = self.tree.names(other)
            count = common_prefix(names[leaf.start : leaf.start + len(theirs)], theirs)
            stem = other if isinstance(other, Stem) and count == len(theirs) else self._split(other, count)
            if own := min(count, len(leaf.chunks)):
                twin = Node(self.tree.number(), session)
                self.tiers.split(leaf, twin, own)
                self.tiers.fill(stem, twin)
                self.tiers.discard(twin, 0)
            leaf.start, leaf.parent = stem.stop, stem
            stem.waiting += leaf.waiting
            self._hold(stem, session)
            if not stem.running:
                self.tiers.reorder(stem)
        leaf.chunks.add(max(0, len(names) - leaf.start - len(leaf.chunks)))
        self.tree.show(leaf, names[leaf.start :])

    def _split(self, node: Node, count: int) -> Stem:
        stem = self.tree.stem(node, count)
        self.tiers.split(node, stem, count)
        return stem

    def used(self, session: Session) -> None:
        for stem in session.stems():
            self._hold(stem, session)

    def _hold(self, stem: Stem, session: Session) -> None:
        """It is for the sake of this session that the stem is kept now."""
        stem.holders.pop(session.number, None)
        stem.holders[session.number] = session
        if stem.session is not session:
            stem.session = session
            self._pays(stem)

    def _pays(self, stem: Stem) -> None:
        """Have its blocks be held by the session for whose sake they are kept."""
        for pool, blocks in ((self.tiers.gpu, stem.chunks.gpu), (self.tiers.cpu, stem.chunks.cpu)):
            held = [block for block in blocks if block != NO_BLOCK]
            self.facts.passed_on(pool.tier, held, stem.session.number)

    def _leave(self, session: Session, chunks: int) -> None:
        """Have an idle session keep its first `chunks` chunks only; what nobody else has is discarded."""
        leaf = session.leaf
        if chunks >= leaf.start:
            if chunks < leaf.start + leaf.findable:
                size = self.chunk_tokens
                self.tree.show(leaf, session.named(chunks * size, size)[leaf.start :])
            return
        self.tree.hide(leaf)
        self.tiers.discard(leaf, 0)
        for stem in session.stems():
            if stem.start < chunks < stem.stop:
                self._split(stem, chunks - stem.start)
        for stem in reversed(session.stems()):
            if stem.start < chunks:
                break
            leaf.parent, leaf.start = stem.parent, stem.start
            stem.waiting -= leaf.waiting
            del stem.holders[session.number]
            if not stem.holders:
                self.tiers.discard(stem, 0)
                del self.tree.after(stem.parent)[stem.names[0]]
            elif stem.session is session:
                stem.session = next(reversed(stem.holders.values()))
                self._pays(stem)
                self.tiers.reorder(stem)

    # -- the contract -------------------------------------------------------------------------------------------------

    def reorder(self, session: Session) -> None:
        more = bool(session.waiting) - session.leaf.waiting
        for node in session.nodes() if more else ():
            node.waiting += more
        super().reorder(session)

    def _cut(self, session: Session, length: int) -> None:
        self._leave(session, length // self.chunk_tokens)
        self.tiers.cut(session.leaf, max(0, length - session.leaf.start * self.chunk_tokens))

    def _let_go(self, session: Session) -> None:
        self._leave(session, 0)
        super()._let_go(session)

    def _holds(self, session: Session) -> bool:
        """Beyond what others have too, which stays."""
        alone = [stem for stem in session.stems() if len(stem.holders) == 1]
        return super()._holds(session) or any(
            chunk.resident_len or chunk.copying for stem in alone for chunk in stem.chunks
        )

    def check(self) -> None:
        super().check()
        self.tree.check(self.sessions)
