"""What an eviction policy is: one method says which chunk goes first, and everything else has a default."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from pensieve.core.session import Session
from pensieve.errors import ConfigError, PolicyError

MOST_TOOLS = 256
"""Names that clients make up: of no more of them a policy keeps counts."""


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

    together: Callable[[Sequence[Session], int, int, float], Sequence[float]] | None = None
    """`scores` of chunks that all these sessions have, the one active last at the front; none is lower than for that one
    alone. None: they are those of that one. Asked only of a policy that tells scores."""

    def __init__(self, context: PolicyContext) -> None:
        self.context = context

    @abstractmethod
    def order(self, session: Session, chunk: int) -> float:
        """The key of a chunk within its bucket; the lowest goes first."""

    def bucket(self, session: Session, chunk: int) -> Hashable:
        """Which candidates keep their order among each other while they are idle."""
        return None

    def score(self, bucket: Hashable, order: float, now_s: float) -> float:
        """The key of the first candidate of a bucket among all of these; the lowest goes first."""
        return order

    def scores(self, session: Session, start: int, stop: int, now_s: float) -> Sequence[float]:
        """What `score` says of each chunk in [start, stop), told at once. A policy need not have its own: its victims are
        then chosen chunk by chunk (see tells_scores). Under one that has, equal scores in a bucket go by last active."""
        chunks = range(start, stop)
        return [self.score(self.bucket(session, chunk), self.order(session, chunk), now_s) for chunk in chunks]


class _PlainPolicy(EvictionPolicy):
    """Somebody's own class that has methods of a policy but does not inherit the defaults."""

    def __init__(self, plain: Any) -> None:
        self.plain = plain
        self.whole_conversations = bool(getattr(plain, "whole_conversations", False))
        self._bucket: Callable[..., Any] = getattr(plain, "bucket", super().bucket)
        self._score: Callable[..., Any] = getattr(plain, "score", super().score)
        self.ages = tuple(getattr(plain, "ages", ()))
        self.observe = getattr(plain, "observe", None)
        self.rest = getattr(plain, "rest", None)

    @property
    def version(self) -> int:  # type: ignore[override]
        version: int = getattr(self.plain, "version", 0)
        return version

    def order(self, session: Session, chunk: int) -> Any:
        return self.plain.order(session, chunk)

    def bucket(self, session: Session, chunk: int) -> Any:
        return self._bucket(session, chunk)

    def score(self, bucket: Hashable, order: float, now_s: float) -> Any:
        return self._score(bucket, order, now_s)


def as_policy(policy: Any) -> EvictionPolicy:
    """The policy, with the defaults where it has methods of its own only. Raises ConfigError for what is no policy."""
    if isinstance(policy, EvictionPolicy):
        return policy
    if not callable(getattr(policy, "order", None)):
        raise ConfigError(
            f"{type(policy).__name__} is no eviction policy: it has no method order(session, chunk); make it a subclass of "
            "pensieve.core.policies.base.EvictionPolicy."
        )
    return _PlainPolicy(policy)


def tells_scores(policy: EvictionPolicy) -> bool:
    """Whether it has `scores`, which no class below has made untrue by another bucket, order or score."""
    kind = type(policy)
    definer = {
        name: next(index for index, one in enumerate(kind.__mro__) if name in vars(one))
        for name in ("bucket", "order", "score", "scores")
    }
    return kind.scores is not EvictionPolicy.scores and definer["scores"] <= min(definer.values())


def refuse_key(policy: EvictionPolicy, method: str, key: object, session: str) -> NoReturn:
    """Raise PolicyError for what `order` or `score` returned: it can be compared with no number."""
    own = policy.plain if isinstance(policy, _PlainPolicy) else policy
    code = getattr(getattr(own, method, None), "__code__", None)
    where = f" ({code.co_filename}, line {code.co_firstlineno})" if code else ""
    raise PolicyError(
        f"{type(own).__name__}.{method}{where} returned {key!r} for a chunk of conversation {session!r}, which stands "
        "neither before nor after another; return a number."
    )


def needs_future(policy: Any) -> bool:
    """Whether a policy, or the class of one, reads when a session is asked again."""
    return bool(getattr(policy, "needs_future", False))
