"""vLLM's CachePolicy by one of our eviction policies, without vLLM: chunks by name in, chunks to evict out."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar, cast

from pensieve.core.policies.base import EvictionPolicy
from pensieve.core.request import Hint, TokenArray
from pensieve.core.session import Session
from pensieve.errors import PensieveError
from pensieve.plugins.caches.cpu_tier import FromTail, Lru, Use

log = logging.getLogger("vllm.pensieve")

ACTION = "pensieve"
"""The type of the KV hint whose payload names the conversation."""
REMEMBERED = 4096  # conversations, or as many as there are chunks
_HINTS = tuple(one.name for one in fields(Hint))
_T = TypeVar("_T")


@dataclass(slots=True)
class _Asked:
    """A request. known: its conversation has been found, not only begun. missed: chunks that it wanted to store."""

    session: Session
    said: Mapping[str, Any]
    known: bool
    began_s: float
    missed: set[bytes]


class TailPolicy:
    """The methods of vLLM 0.32's CachePolicy (v1/kv_offload/cpu/policies/base.py), which its scheduler calls from one thread.

    Chunks are its ChunkStatus, contexts its ReqContext. make: the eviction policy, anew. chunk_tokens: of a chunk of vLLM,
    which is `blocks_per_chunk` chunks of the policy.

    A request names its conversation in kv_transfer_params["session"], or in the payload of a KV hint of type "pensieve"; the
    fields of core.hint.Hint may stand beside it. Where it names none, it goes on with the conversation whose last full chunk
    its prompt has, which may be known only when the request ends.

    What the eviction policy raises is logged once, and least recently used goes first from then on. failure: that exception.
    by_lru: choices that were made so.
    """

    def __init__(
        self,
        make: Callable[[], EvictionPolicy],
        capacity: int,
        chunk_tokens: int,
        blocks_per_chunk: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make, self._per, self._clock = make, blocks_per_chunk, clock
        self._chunk_tokens, self._remembered = chunk_tokens, max(REMEMBERED, capacity)
        self.failure: Exception | None = None
        self.by_lru = self._sessions = 0
        self._told = False
        self.clear()

    # -- vLLM's methods -----------------------------------------------------------------------------------------------

    def clear(self) -> None:
        self._chunks: dict[bytes, Any] = {}
        self._lru = Lru()
        self._named: OrderedDict[str, Session] = OrderedDict()
        self._ends: OrderedDict[bytes, Session] = OrderedDict()  # last full chunk -> conversation without a name
        self._asked: dict[str, _Asked] = {}
        self._expected: dict[bytes, tuple[Session, int]] = {}  # missed and not inserted yet
        self._nobody = self._new("")
        self._policy = self._make()
        self._tail = None if self.failure else FromTail(self._policy, self._per)

    def get(self, key: bytes) -> Any:
        return self._chunks.get(key)

    def insert(self, key: bytes, chunk: Any) -> None:
        self._chunks[key] = chunk
        session, index = self._expected.pop(key, (self._nobody, 0))
        self._lru.insert(key, session, index)
        self._try(lambda tail: tail.insert(key, session, index))

    def remove(self, key: bytes) -> None:
        del self._chunks[key]
        self._lru.remove(key)
        self._try(lambda tail: tail.remove(key))

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        places = self._places(keys, req_context)
        self._used(self._ask(req_context, places).session, Use(0, places))

    def on_store_miss(self, keys: Iterable[bytes], req_context: Any) -> None:
        places = self._places(keys, req_context)
        asked = self._ask(req_context, places)
        asked.missed.update(places)
        self._expected |= {key: (asked.session, index) for key, index in places.items()}

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: set[bytes],
        reused_keys: set[bytes],
        req_context: Any,
    ) -> None:
        places = self._places((key for group in key_groups for key in group), req_context)
        asked = self._ask(req_context, places)
        del self._asked[req_context.req_id]
        for key in asked.missed:
            self._expected.pop(key, None)
        session = asked.session
        if not asked.known:
            session = self._continued(places) or session
            self._begin(session, places, asked.began_s)
        if "session" not in asked.said and places:
            self._keep(self._ends, key_groups[0][-1], session)
        self._lengthen(session, places)
        session.last_active_s, session.hint = self._clock(), _hint(asked.said)
        if (rest := self._policy.rest) is not None:
            self._try(lambda _: rest(session, session.last_active_s))
        self._used(session, Use(len(session.tokens), places, set(reused_keys), set(insertion_only_keys)))

    def evict(self, n: int, protected: Collection[bytes]) -> list[tuple[bytes, Any]] | None:
        chunks, now_s = self._chunks, self._clock()

        def evictable(key: bytes) -> bool:
            return chunks[key].ref_cnt == 0 and key not in protected

        if n == 0:
            return []
        chosen = self._try(lambda tail: tail.choose(n, evictable, now_s))
        if self._tail is None:
            self.by_lru += 1
            chosen = self._lru.choose(n, evictable, now_s)
        elif chosen is not None:
            for key in chosen:
                self._lru.remove(key)
        return None if chosen is None else [(key, chunks.pop(key)) for key in chosen]

    # -- conversations ------------------------------------------------------------------------------------------------

    def _ask(self, context: Any, places: Mapping[bytes, int]) -> _Asked:
        """The request, which has just begun where it is not known."""
        asked = self._asked.get(context.req_id)
        if asked is None:
            said, now_s = _said(context), self._clock()
            name = said.get("session")
            if name is None and not self._told:
                self._told = True
                log.info(
                    "A request names no session (kv_transfer_params.session): each prompt goes on with the conversation "
                    "whose last full chunk it has."
                )
            found = self._continued(places) if name is None else self._named.pop(str(name), None) or self._new(name)
            if found is not None:
                self._begin(found, places, now_s)
            if name is not None and found is not None:
                self._keep(self._named, str(name), found)
            asked = _Asked(found or self._new(context.req_id), said, found is not None, now_s, set())
            self._asked[context.req_id] = asked
        return asked

    def _begin(self, session: Session, places: Mapping[bytes, int], now_s: float) -> None:
        """A turn of it."""
        self._lengthen(session, places)
        if (observe := self._policy.observe) is not None:
            self._try(lambda _: observe(session, now_s))
        session.turns += 1
        session.last_active_s = now_s
        self._try(lambda tail: tail.changed(session))

    def _lengthen(self, session: Session, places: Mapping[bytes, int]) -> None:
        """Policies ask how many tokens there are, and never which."""
        tokens = (max(places.values(), default=-1) + 1) * self._chunk_tokens
        session.tokens = cast("TokenArray[int]", range(max(tokens, len(session.tokens))))

    def _new(self, name: object) -> Session:
        self._sessions += 1
        now_s = self._clock()
        return Session(str(name), self._sessions, now_s, now_s)

    def _continued(self, places: Mapping[bytes, int]) -> Session | None:
        """The conversation whose last full chunk is among these, the last one of them; it has none until it is kept again."""
        return next((self._ends.pop(key) for key in reversed(list(places)) if key in self._ends), None)

    def _keep(self, known: OrderedDict[Any, Session], name: Any, session: Session) -> None:
        known[name] = session
        known.move_to_end(name)
        if len(known) > self._remembered:
            known.popitem(last=False)

    # -- how ----------------------------------------------------------------------------------------------------------

    def _places(self, keys: Iterable[bytes], context: Any) -> dict[bytes, int]:
        """The index of each chunk in its prompt."""
        size, end = self._chunk_tokens, context.get_offload_key_position
        return {key: max(0, (end(key) or 0) // size - 1) for key in keys}

    def _used(self, session: Session, use: Use) -> None:
        self._lru.used(session, use)
        self._try(lambda tail: tail.used(session, use))
        self._try(lambda tail: tail.changed(session))

    def _try(self, act: Callable[[FromTail], _T]) -> _T | None:
        """What the order says; None, and never asked again, where the policy raises."""
        if self._tail is None:
            return None
        try:
            return act(self._tail)
        except Exception as error:  # whatever it is, no request shall end by it
            self.failure, self._tail = error, None
            name = type(self._policy).__name__
            log.exception("The eviction policy %s failed; least recently used goes first from now on.", name)
            return None


def _said(context: Any) -> Mapping[str, Any]:
    """What the client said of the conversation."""
    actions = getattr(context.kv_hints, "actions", ())
    hinted = [action.payload for action in actions if action.action_type == ACTION]
    return {name: value for said in (*hinted, context.kv_transfer_params or {}) for name, value in said.items()}


def _hint(said: Mapping[str, Any]) -> Hint | None:
    given = {name: said[name] for name in _HINTS if said.get(name) is not None}
    try:
        return Hint(**given) if given else None
    except PensieveError as error:
        log.warning("A request's hint is not understood: %s", error)
        return None
