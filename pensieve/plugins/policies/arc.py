"""ARC: recency and frequency share the cache as each would have hit (Megiddo and Modha, FAST 2003)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from pensieve.core.policies.base import EvictionPolicy, PolicyContext
from pensieve.core.session import Session


class TokenList:
    """Sessions by number, the one listed first in front, with the tokens of each and of all."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[int, int] = OrderedDict()
        self.total = 0

    def __contains__(self, number: int) -> bool:
        return number in self._tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def append(self, number: int, tokens: int) -> None:
        """List it last; it must not be listed already."""
        assert number not in self._tokens
        self._tokens[number] = tokens
        self.total += tokens

    def remove(self, number: int) -> int:
        """Returns its tokens; 0 where it is not listed."""
        tokens = self._tokens.pop(number, 0)
        self.total -= tokens
        return tokens

    def pop_first(self) -> tuple[int, int]:
        """(session number, tokens)."""
        number, tokens = self._tokens.popitem(last=False)
        self.total -= tokens
        return number, tokens


class ArcDirectory:
    """Which sessions ARC would hold in `capacity` tokens: `once`, asked one time (T1), and `again`, asked more often
    (T2), each least recently used first; and of those it gave up, names and sizes (B1, B2). `target` is how large `once`
    should be: it grows when a session given up from there returns, and shrinks when one from `again` does.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.target = 0.0
        self.once, self.again = TokenList(), TokenList()
        self.gone_once, self.gone_again = TokenList(), TokenList()

    @property
    def gives_up_once(self) -> bool:
        """Whether the next to go is of `once`: REPLACE in the paper."""
        return not self.again or (len(self.once) > 0 and self.once.total > self.target)

    def ask(self, number: int, tokens: int) -> bool:
        """A turn of it; returns whether it was known, so that it is in `again` now."""
        known = True
        if number in self.once or number in self.again:
            self.once.remove(number)
            self.again.remove(number)
        elif number in self.gone_once:
            step = max(1.0, self.gone_again.total / self.gone_once.total) * self.gone_once.remove(number)
            self.target = min(float(self.capacity), self.target + step)
        elif number in self.gone_again:
            step = max(1.0, self.gone_once.total / self.gone_again.total) * self.gone_again.remove(number)
            self.target = max(0.0, self.target - step)
        else:
            known = False
        held, other = self.once.total + self.again.total, len(self.once) + len(self.again)
        while other and held + tokens > self.capacity:
            gone, source = (self.gone_once, self.once) if self.gives_up_once else (self.gone_again, self.again)
            gone.append(*source.pop_first())
            held, other = self.once.total + self.again.total, other - 1
        (self.again if known else self.once).append(number, tokens)
        while self.gone_once and self.once.total + self.gone_once.total > self.capacity:
            self.gone_once.pop_first()
        while self.gone_again and self._listed > 2 * self.capacity:
            self.gone_again.pop_first()
        return known

    @property
    def _listed(self) -> int:
        return sum(part.total for part in (self.once, self.again, self.gone_once, self.gone_again))


class Arc(EvictionPolicy):
    """The least recently used of the sessions asked once, or of those asked again: of whichever ARC gives up now.

    Approximation: the paper's lists are of equal pages, and learn of each eviction. Here a directory of whole sessions,
    as large as both tiers, is kept beside the cache, sees each admission, and says which of the two goes first.
    """

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self.directory = ArcDirectory((context.gpu_blocks + context.cpu_blocks) * context.chunk_tokens)

    def observe(self, session: Session, now_s: float) -> None:
        session.memo = self.directory.ask(session.number, len(session.tokens))

    def bucket(self, session: Session, chunk: int) -> bool:
        """Whether it was asked again while it was known."""
        return bool(session.memo)

    def order(self, session: Session, chunk: int) -> float:
        return session.last_active_s

    def score(self, bucket: Hashable, order: float, now_s: float) -> float:
        return 0.0 if bool(bucket) is not self.directory.gives_up_once else 1.0
