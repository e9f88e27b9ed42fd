"""S3-FIFO: a small queue lets newcomers go quickly, and a main one keeps what was asked again (Yang et al., SOSP 2023)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from pensieve.core.policies.base import EvictionPolicy, PolicyContext
from pensieve.core.session import Session
from pensieve.plugins.policies.token_list import TokenList

_SMALL_SHARE = 0.1  # of the cache, as in the paper
_TIMES = 2  # asked so often while in the small queue, a session belongs into the main one


@dataclass(slots=True)
class _Place:
    """In which queue a session is, since when, and how often it was asked there."""

    main: bool
    since_s: float
    asked: int = 0


class S3Fifo(EvictionPolicy):
    """While the small queue has more than its tenth of the cache its first session goes, else that of the main queue.
    A newcomer enters the small queue; it enters the main one where it was given up not long ago (a ghost).

    Approximations: as for ARC, queues are of whole sessions, as large as both tiers together, kept beside the cache. A
    session enters the main queue when it is asked for the third time, not when it has come to the end of the small one;
    and the main queue is in order of last use, which the paper's second chances approximate.
    """

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self.capacity = (context.gpu_blocks + context.cpu_blocks) * context.chunk_tokens
        self.small, self.main, self.ghosts = TokenList(), TokenList(), TokenList()

    @property
    def gives_up_small(self) -> bool:
        return not self.main or (len(self.small) > 0 and self.small.total >= _SMALL_SHARE * self.capacity)

    def observe(self, session: Session, now_s: float) -> None:
        number, tokens, place = session.number, len(session.tokens), session.memo
        if number in self.small and place.asked + 1 < _TIMES:
            place.asked += 1
            self.small.resize(number, tokens)
        elif number in self.small or number in self.main or number in self.ghosts:
            for queue in (self.small, self.main, self.ghosts):
                queue.remove(number)
            self.main.append(number, tokens)
            session.memo = _Place(True, now_s)
        else:
            self.small.append(number, tokens)
            session.memo = _Place(False, now_s)
        while self.small.total + self.main.total > self.capacity and len(self.small) + len(self.main) > 1:
            if self.gives_up_small:
                self.ghosts.append(*self.small.pop_first())
            else:
                self.main.pop_first()
        while self.ghosts.total > self.capacity:
            self.ghosts.pop_first()

    def bucket(self, session: Session, chunk: int) -> bool:
        """Whether it is of the main queue."""
        return session.memo is not None and session.memo.main

    def order(self, session: Session, chunk: int) -> float:
        if session.memo is None:
            return session.created_s
        return session.last_active_s if session.memo.main else float(session.memo.since_s)

    def score(self, bucket: Hashable, order: float, now_s: float) -> float:
        return 0.0 if bool(bucket) is not self.gives_up_small else 1.0
