"""Conversations at random, for policies to choose among: what happened is kept, so that a slow definition can read it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pensieve.core.cache.victims import VictimIndex
from pensieve.core.policies.base import EvictionPolicy, PolicyContext
from pensieve.core.request import Hint
from pensieve.core.session import Chunks, Session, View
from tests.simulated import policy_context

CHUNKS = 6
Key = Callable[[Session, int], tuple[float, ...]]


@dataclass(frozen=True)
class Event:
    """asked: a turn was admitted; else it ended. tokens, hint, turns: of the conversation then."""

    asked: bool
    number: int
    at_s: float
    tokens: int
    turns: int
    hint: Hint | None


@dataclass
class World:
    """Turns of `sessions` under a policy. Times are multiples of 1/8 s, so that no sum is rounded."""

    policy: EvictionPolicy
    seed: int
    hints: Sequence[Hint | None] = (None,)
    now_s: float = 4.0
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.index = VictimIndex(self.policy, View.DIRTY)
        self.sessions = [Session(str(number), number, 0.0, 0.0) for number in range(9)]

    def turn(self) -> None:
        """Of any of them: its chunks leave, and some are back when it ends."""
        rng, session = self.rng, self.rng.choice(self.sessions)
        self.now_s += rng.choice((0.0, 0.125, 2.0, 9.0))
        session.turns += 1
        if session.turns > 1 and rng.random() < 0.1:
            del session.tokens[:]
        session.extend(range(rng.randint(1, 4)))
        if self.policy.observe is not None:
            self.policy.observe(session, self.now_s)
        self._note(True, session)
        session.start(self.now_s)
        self.index.remove(session.leaf)
        session.leaf.chunks = Chunks(CHUNKS)
        self.now_s += rng.choice((0.0, 0.25, 1.0))
        session.extend(range(rng.randint(1, 4)))
        session.hint = rng.choice(self.hints)
        if self.policy.rest is not None:
            self.policy.rest(session, self.now_s)
        self._note(False, session)
        session.stop(self.now_s)
        for chunk in range(CHUNKS):
            if rng.random() < 0.6:
                session.chunks.view[chunk] = View.DIRTY
                self.index.changed(session.leaf, 1)

    def pass_time(self) -> None:
        self.now_s += self.rng.choice((0.0, 0.5, 3.0, 30.0, 500.0))
        session = self.rng.choice(self.sessions)
        session.waiting = (0,) * self.rng.randint(0, 1)
        self.index.refresh(session.leaf)

    def expected(self, key: Key) -> tuple[int, int] | None:
        """Over the first chunk of every conversation: the lowest by definition."""
        candidates = []
        for session in self.sessions:
            lead = next((i for i, chunk in enumerate(session.chunks) if chunk.view is View.DIRTY), None)
            if lead is not None:
                place = (session.last_active_s, session.number, lead)
                candidates.append((len(session.waiting), key(session, lead), *place))
        return min(candidates)[3:] if candidates else None

    def take(self, session: Session, chunk: int) -> None:
        session.chunks.view[chunk] = View.NONE
        self.index.changed(session.leaf, -1)

    def _note(self, asked: bool, session: Session) -> None:
        self.events.append(Event(asked, session.number, self.now_s, len(session.tokens), session.turns, session.hint))


def context() -> PolicyContext:
    """48 tokens in both tiers, chunks of 4: chunk i takes 1 + (i + 1) / 2 seconds to recompute, 0.1 to load."""
    return policy_context(chunk_tokens=4, gpu_blocks=6, cpu_blocks=6)


def holds(world: World, definition: Callable[[World], Key], steps: int = 60) -> int:
    """Each choice is the one that the definition makes of everything that happened; how many there were."""
    chosen = 0
    for _ in range(steps):
        world.turn()
        if world.rng.random() < 0.4:
            world.pass_time()
        for victim, chunk in world.index.victims(world.now_s):
            assert (victim.number, chunk) == world.expected(definition(world))
            world.take(victim.session, chunk)
            chosen += 1
            if world.rng.random() < 0.5:
                break
    return chosen
