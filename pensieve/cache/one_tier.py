"""What managers with a single tier have in common: nothing is ever copied, and a prompt finds a prefix or nothing."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

from pensieve.cache.base import Admission, CacheManager, Residency, edited_run
from pensieve.cache.block_hash import HashChain
from pensieve.cache.content import SeenContent
from pensieve.ledger import Missed, joined
from pensieve.plan import Copy
from pensieve.request import TokenArray
from pensieve.session import Session


class OneTier(CacheManager):
    """A subclass says what a prompt finds (`_occupy`), how its work follows from that, and what becomes of it afterwards."""

    partial_hits: bool
    """A prompt can find part of a block; if not, full blocks only."""

    def __init__(self, chunk_tokens: int, gpu_blocks: int) -> None:
        super().__init__(chunk_tokens, gpu_blocks, cpu_blocks=0)
        self._chains: dict[int, HashChain] = {}
        self._seen: SeenContent | None = None
        self._unnoted: dict[int, Session] = {}  # sessions that have run since they were noted last

    @abstractmethod
    def _occupy(self, session: Session, now_s: float) -> int:
        """Start the session and take blocks for all of its tokens and one more; returns how many leading tokens have KV there
        already."""

    @abstractmethod
    def _admission(self, session: Session, residency: Residency, found: int) -> Admission: ...

    @abstractmethod
    def _missed(self, session: Session, found: int, history: int) -> Iterable[Missed]:
        """Why positions [found, history) of the session that starts have no KV."""

    def truncate(self, session: Session, length: int, computed: int | None = None) -> None:
        self._note(session)
        self._unnoted.pop(session.number, None)
        session.rollback(length, computed)
        self._chains[session.number].cut(length)
        if self._seen is not None:
            self._seen.cut(session.number, length // self.chunk_tokens)

    def open(self, name: str, now_s: float, tenant: str = "") -> Session:
        session = super().open(name, now_s, tenant)
        self._chains.setdefault(session.number, HashChain(self.chunk_tokens, session.tenant))
        return session

    def watch_content(self) -> None:
        self._seen = SeenContent()

    @property
    def outgoing(self) -> int:
        return 0

    def admit(self, session: Session, keep: int, suffix: TokenArray[int], known: int | None, now_s: float) -> Admission:
        prompt = keep + len(suffix)
        history = min(keep, session.computed, prompt - 1) if known is None else min(known, prompt - 1)
        edited = edited_run(session, keep, suffix, history)
        if keep < len(session.tokens):
            self.truncate(session, keep)
        session.extend(suffix)
        elsewhere, anywhere = self._findable(session)
        found = self._occupy(session, now_s)
        hit = min(found, history)
        own = self._missed(session, hit, min(history, keep))
        moved = Missed(max(hit, keep), history, "edited")  # known to the workload, at another place
        missed = (*joined((*own, moved)), *edited)
        return self._admission(
            session, Residency(prompt, history, hit, 0, found - hit, elsewhere, anywhere, missed), found
        )

    def resume(self, session: Session, now_s: float) -> Admission:
        length = len(session.tokens)
        found = self._occupy(session, now_s)
        return self._admission(session, Residency(length, length - 1, 0, 0), found)

    def preempt(self, session: Session, now_s: float) -> tuple[Copy, ...]:
        self.release(session, now_s)
        return ()

    def swap_out(self, blocks: int, now_s: float, urgent: bool) -> tuple[Copy, ...]:
        return ()

    def drop(self, blocks: int, now_s: float) -> int:
        return 0  # everything idle is available already

    def complete(self, tickets: Sequence[int]) -> None:
        assert not tickets

    def void(self, tickets: Sequence[int]) -> list[Session]:
        assert not tickets
        return []

    def launched(self, step: int) -> None:
        return None  # nothing is copied, so no block waits for a plan

    def collected(self, step: int) -> None:
        return None

    # -- how --------------------------------------------------------------------------------------------------------

    def _findable(self, session: Session) -> tuple[int | None, int | None]:
        """At most so many leading tokens of its prompt were in another session, and in any, up to this moment."""
        if self._seen is None:
            return None, None
        for other in list(self._unnoted.values()):
            self._note(other)
            if not other.running:
                del self._unnoted[other.number]
        size, length = self.chunk_tokens, len(session.tokens)
        blocks = self._chains[session.number].upto(session.tokens, length)
        counts = self._seen.elsewhere(session.number, blocks), self._seen.anywhere(blocks)
        self._note(session)
        self._unnoted[session.number] = session
        partial = size - 1 if self.partial_hits else 0
        elsewhere, anywhere = (min(count * size + partial, length - 1) for count in counts)
        return elsewhere, anywhere

    def _leave_noted(self, session: Session) -> None:
        """What was said in it stays noted, and nothing else of it is kept here."""
        self._note(session)
        self._unnoted.pop(session.number, None)
        if self._seen is not None:
            self._seen.ended(session.number)
        del self._chains[session.number]

    def _note(self, session: Session) -> None:
        if self._seen is not None:
            blocks = self._chains[session.number].upto(session.tokens, len(session.tokens))
            self._seen.note(session.number, blocks)
