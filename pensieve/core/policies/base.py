"""What an eviction policy is: one method says which chunk goes first, and everything else has a default."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from pensieve.core.session import Session
from pensieve.errors import ConfigError, PolicyError

Scores = Sequence[float] | NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What every policy is made with.

    recompute_s(context_tokens): seconds to recompute the chunk that ends at that context length. load_s: seconds to bring
    one chunk back from CPU.
    """

    chunk_tokens: int
    gpu_blocks: int
    cpu_blocks: int
    recompute_s: Callable[[int], float]
    load_s: float
    seed: int


class EvictionPolicy(ABC):
    """Which chunk is evicted first: the one of lowest score; ties go by last active, session number and chunk index.

    Only the first evictable chunk of each session is a candidate. Candidates of one bucket are sorted by `order`, and
    that order must not change while their sessions are idle. `score` compares the first of each bucket at the time of
    the choice. So a choice is exact although it looks at one candidate a bucket, and a policy whose order never changes
    needs one bucket only: it is a subclass with the method `order`. Where the order of two candidates changes with time in
    another way, it may change at the policy's `ages` alone.

    It may read of a session: last_active_s, created_s, turns, tokens (their number), and hint: what the client said of the
    time after the last reply. `next_use_s` is for policies that declare `needs_future`.
    """

    whole_conversations = False
    """A choice goes on until the session has nothing left to evict."""

    needs_future = False
    """It reads Session.next_use_s, so live traffic refuses it."""

    version = 0
    """A change of it says that bucket and order of everything changed."""

    ages: Sequence[float] = ()
    """Seconds of idleness, ascending, at which a session's score changes by more than its order says: candidates of a
    bucket keep their order only while they have passed equally many of them."""

    observe: Callable[[Session, float], None] | None = None
    """A turn of the session is admitted, at this time; its tokens include the new prompt, and last_active_s and hint are
    still those of the end of the turn before. None: it is not told."""

    rest: Callable[[Session, float], None] | None = None
    """A turn of the session is over, at this time, and its chunks are about to become candidates; tokens and hint are those
    of that turn. None: it is not told."""

    together: Callable[[Sequence[Session], int, int, float], Scores] | None = None
    """`score` of chunks that all these sessions have, the one active last at the front; none is lower than for that one
    alone. None: they are those of that one."""

    many: Callable[[NDArray[np.float64], NDArray[np.int64], float], NDArray[np.float64]] | None = None
    """`score` of chunks of many sessions at once, where all chunks of a session have one order: from the order and the index
    of each. None: each is asked by itself."""

    def __init__(self, context: PolicyContext) -> None:
        self.context = context

    def __init_subclass__(cls) -> None:
        """What a class inherits of `many` and `together` is not true of another bucket, order or score of its own."""
        if vars(cls).keys() & {"bucket", "order", "score"}:
            cls.many, cls.together = vars(cls).get("many"), vars(cls).get("together")

    @abstractmethod
    def order(self, session: Session, chunk: int) -> float:
        """The key of a chunk within its bucket; the lowest goes first."""

    def bucket(self, session: Session, chunk: int) -> Hashable:
        """Which candidates keep their order among each other while they are idle."""
        return None

    def score(self, bucket: Hashable, order: float, now_s: float) -> float:
        """The key of the first candidate of a bucket among all of these; the lowest goes first."""
        return order

    def scores(self, session: Session, start: int, stop: int, now_s: float) -> Scores:
        """What `score` says of each chunk in [start, stop)."""
        if self.many is not None:
            return self.many(np.full(stop - start, self.order(session, start)), np.arange(start, stop), now_s)
        chunks = range(start, stop)
        return [self.score(self.bucket(session, chunk), self.order(session, chunk), now_s) for chunk in chunks]

    def below(self, orders: NDArray[np.float64], score: float, now_s: float) -> NDArray[np.int64]:
        """For `many`: of sessions with these orders, no chunk from here on has a lower score."""
        return np.full(len(orders), np.iinfo(np.int64).max)


def as_policy(policy: object) -> EvictionPolicy:
    """The policy. Raises ConfigError for what is none."""
    if not isinstance(policy, EvictionPolicy):
        raise ConfigError(
            f"{type(policy).__name__} is no eviction policy; make it a subclass of "
            "pensieve.core.policies.base.EvictionPolicy."
        )
    return policy


def refuse_key(policy: EvictionPolicy, method: str, key: object, session: str) -> NoReturn:
    """Raise PolicyError for what `order` or `score` returned: it can be compared with no number."""
    code = getattr(policy, method).__code__
    where = f"{type(policy).__name__}.{method} ({code.co_filename}, line {code.co_firstlineno})"
    raise PolicyError(
        f"{where} returned {key!r} for a chunk of conversation {session!r}, which stands neither before nor after another; "
        "return a number."
    )
