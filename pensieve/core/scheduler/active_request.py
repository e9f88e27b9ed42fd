"""A request on its way through the engine, from its arrival to its end, and the queue of those that wait."""

from __future__ import annotations

import hashlib
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pensieve.core.facts import Admission
from pensieve.core.plan import Row, Sample
from pensieve.core.request import Forced, Free, Request, Sampling, TokenArray
from pensieve.core.session import Run, Session, chunks_of, common_prefix, tokens_in
from pensieve.errors import CapacityError, ContextLengthError, RequestRefused


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """One request; its methods are the transitions of its life and alone change it, but for in_flight:

        arrive -> waiting -- start --> running -- close --> closed, until no launched plan has a part of it
                     ^                    |
                     +----- preempt ------+

    and while it runs, for each iteration: next_row, then, where the row was sampled, append. Whoever calls start, preempt or
    leave_slot keeps the slots and tells the cache; whoever launches and collects plans counts in_flight.

    arrival: its place in the order of arrival, kept when it is preempted. work: positions without KV, ascending; the last
    one ends at the last known token, so a decode is work of one position. slot: the worker's, while it runs. in_flight:
    launched plans that have a part of it; its blocks and its slot stay its own until there are none, also when it is
    closed, which is to say over for whoever asked. awaited: tokens that those plans sample. reserved: positions that its
    blocks have room for.
    length_before, computed_before: of the session at the admission, of tokens that it keeps; a turn that does not stand
    returns to them. misread: what it read from disk was something else. eos, stop: what ends it early. generated: tokens of
    its output so far. admitted: it has run. status, closed_s: how and when it was closed.
    """

    request: Request
    arrival: int
    session: Session
    noise_key: int
    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    stop: Callable[[int], bool] | None = None
    work: deque[Run] = field(default_factory=deque)
    work_tokens: int = 0
    slot: int | None = None
    length_before: int = 0
    computed_before: int = 0
    generated: int = 0
    admitted: bool = False
    misread: bool = False
    preempted: bool = False
    in_flight: int = 0
    awaited: int = 0
    reserved: int = 0
    closed: bool = False
    status: str = ""
    closed_s: float = 0.0
    _common: tuple[int, int] | None = None
    """Of the session when its prompt was held against it: its length, and the common prefix."""

    @classmethod
    def arrive(
        cls,
        request: Request,
        session: Session,
        arrival: int,
        turn: int,
        eos: frozenset[int],
        search: Callable[[Sequence[str]], Callable[[int], bool]] | None,
    ) -> ActiveRequest:
        """Make that of a request that has just arrived. turn: its number. eos, search: as Engine takes them."""
        output = request.output
        noise = noise_key(request.sampling, request.session, turn)
        active = cls(request, arrival, session, noise, output.max_new_tokens)
        if isinstance(output, Free):
            if not output.ignore_eos:
                active.eos = eos
            if output.stop and search is not None:
                active.stop = search(output.stop)
        return active

    # -- waiting ------------------------------------------------------------------------------------------------------

    def refusal(self, chunk_tokens: int, request_blocks: int, max_context: int) -> RequestRefused | None:
        """Why this request cannot be served even alone on the device, or None."""
        length, new = len(self.request.prompt), self.max_new_tokens
        if length < 1:
            return RequestRefused("The prompt is empty; send at least one token.")
        if length + new > max_context:
            return ContextLengthError(
                f"Prompt and output are {length} + {new} tokens, but the model's context is {max_context}; "
                "shorten the conversation or ask for fewer tokens."
            )
        # The last token of a turn gets no KV; admission reserves one position beyond the prompt.
        blocks = chunks_of(length + max(new - 1, 1), chunk_tokens)
        if blocks > request_blocks:
            return CapacityError(
                f"The request needs {blocks * chunk_tokens} tokens of KV, and one request can have "
                f"{request_blocks * chunk_tokens} on the GPU tier; raise cache.gpu or "
                "shorten the conversation."
            )
        return None

    def kept(self) -> int:
        """Leading tokens of the session that its admission keeps: all, if it was preempted; else those that the prompt
        begins with. The last prompt token is always computed anew, since its logits give the first output token. To be asked
        of the head of the queue only: nothing changes its session while it waits there."""
        held, prompt = self.session.tokens, self.request.prompt
        if self.preempted:
            return len(held)
        if self._common is None or self._common[0] != len(held):
            self._common = len(held), common_prefix(held, prompt)
        return min(self._common[1], len(prompt) - 1)

    @property
    def prompt(self) -> TokenArray[int]:
        """What its admission computes or finds, tokens generated before a preemption included."""
        return self.session.tokens if self.preempted else self.request.prompt

    def remember_session(self, keep: int) -> None:
        """Remember, before the first admission, what the session returns to if the turn does not stand. keep: tokens
        that the admission keeps."""
        self.length_before, self.computed_before = keep, min(self.session.computed, keep)

    def start(self, admission: Admission, slot: int) -> None:
        """Begin to run in `slot`: it is admitted, or resumed after it was preempted."""
        self.admitted = True
        self.preempted = self.misread = False
        self.slot = slot
        self.work = deque(admission.work)
        self.work_tokens = tokens_in(admission.work)

    # -- running ------------------------------------------------------------------------------------------------------

    @property
    def decoding(self) -> bool:
        """One position is left and it is a token this turn sampled, or is about to."""
        return self.work_tokens == 1 and (self.awaited > 0 or self.generated > 0)

    def next_row(self, count: int, ahead: bool, with_ids: bool = True) -> Row:
        """Take the first `count` positions of the work into the plan being made. ahead: the next plan is made before this
        one is collected, so the position of a token that it samples is work at once. with_ids: the worker reads tokens."""
        assert self.slot is not None
        runs = self.take(count)
        tokens, (first, _), (_, position) = self.session.tokens, runs[0], runs[-1]
        ids: tuple[int, ...] | None
        if not with_ids:
            ids = None
        elif position > len(tokens):  # of a token that is still being sampled
            output = self.request.output
            ids = (output.tokens[self.generated + self.awaited - 1],) if isinstance(output, Forced) else None
        else:
            ids = (tokens[first],) if count == 1 else tuple(token for run in runs for token in tokens[slice(*run)])
        sample = None
        if not self.work_tokens:
            drawn = self.request.sampling
            sample = Sample(position, self.noise_key, drawn.temperature, drawn.top_p, drawn.top_k)
            self.awaited += 1
            if ahead and self.awaited == 1:
                self.decode_next()
        return Row(self.slot, runs, ids, sample)

    def discard_result(self) -> None:
        """Discard what the plan just collected has computed for it, with the token that it sampled."""
        assert not self.in_flight
        self.awaited = 0

    def append(self, sampled: int) -> int:
        """Append the token that a plan sampled for it, or the one that its output forces; returns the token."""
        output = self.request.output
        token = output.tokens[self.generated] if isinstance(output, Forced) else sampled
        self.awaited -= 1
        self.generated += 1
        self.session.append(token)
        return token

    def go_on(self, tokens: TokenArray[int]) -> None:
        """Append the tokens of iterations in which it had no row."""
        self.session.extend(tokens)
        self.generated += len(tokens)
        self.decode_next()

    def finish_reason(self, token: int) -> str | None:
        """Why this token is its last one; None: it goes on."""
        if token in self.eos:
            return "eos"
        if self.stop is not None and self.stop(token):
            return "stop"
        return "length" if self.generated >= self.max_new_tokens else None

    def decode_next(self) -> None:
        """Make the next token's position its work, unless the tokens awaited are the last ones."""
        awaited = self.awaited
        if self.generated + awaited < self.max_new_tokens:
            position = len(self.session.tokens) - 1 + awaited
            self.work.clear()
            self.work.append((position, position + 1))
            self.work_tokens = 1

    def preempt(self, misread: bool = False) -> int:
        """Make it wait again until blocks are available; misread: since what it read from disk was not what it had asked
        for. Returns the slot it had."""
        self.preempted, self.misread = True, misread
        return self.leave_slot()

    def leave_slot(self) -> int:
        """Stop running; returns the slot it had."""
        assert self.slot is not None
        slot, self.slot = self.slot, None
        return slot

    def take(self, count: int) -> tuple[Run, ...]:
        """Remove the first `count` positions of the work and return them as runs."""
        self.work_tokens -= count
        if count == 1 and self.work[0][1] - self.work[0][0] == 1:  # as of a decode
            return (self.work.popleft(),)
        runs: list[Run] = []
        while count:
            start, stop = self.work.popleft()
            used = min(stop - start, count)
            runs.append((start, start + used))
            count -= used
            if start + used < stop:
                self.work.appendleft((start + used, stop))
        return tuple(runs)

    # -- at its end ---------------------------------------------------------------------------------------------------

    def close(self, status: str, now_s: float) -> None:
        """End it for whoever asked."""
        self.closed, self.status, self.closed_s = True, status, now_s

    @property
    def stands(self) -> bool:
        """Whether the session keeps its tokens: it has generated something, also where it was cut short, unless a failed step
        left its KV in doubt."""
        return self.generated > 0 and self.status not in ("refused", "failed")


def noise_key(sampling: Sampling, session: str, turn: int) -> int:
    """Return the key of the noise that a turn's sampling is drawn with: 63 bits; `hash()` would differ from one process to
    the next."""
    named = str(sampling.seed) if sampling.anonymous else f"{sampling.seed}/{session}/{turn}"
    digest = hashlib.blake2b(named.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class WaitingQueue:
    """Requests that wait, in the order of arrival, the turns of one session one after the other.

    Nobody overtakes a deferred head; only a request whose session is still busy with an earlier one is passed over: it gets
    the place of its own arrival when that one ends.
    """

    def __init__(self) -> None:
        self._ready: list[tuple[int, ActiveRequest]] = []  # a heap, by arrival
        self._turns: dict[str, deque[ActiveRequest]] = {}  # by session; the first one of each is ready, or runs
        self._gone: set[int] = set()  # arrivals of those that were removed and are still in the heap
        self._size = 0

    def __len__(self) -> int:
        """Number of requests that wait, also behind others of their session."""
        return self._size

    def push(self, active: ActiveRequest) -> None:
        turns = self._turns.setdefault(active.session.name, deque())
        turns.append(active)
        self._size += 1
        if len(turns) == 1:
            heapq.heappush(self._ready, (active.arrival, active))

    def push_back(self, active: ActiveRequest) -> None:
        """Queue a preempted request again."""
        self._size += 1
        heapq.heappush(self._ready, (active.arrival, active))

    def head(self) -> ActiveRequest | None:
        ready = self._ready
        while ready and ready[0][0] in self._gone:
            self._gone.discard(heapq.heappop(ready)[0])
        return ready[0][1] if ready else None

    def pop(self) -> None:
        """Take the head out: it runs."""
        heapq.heappop(self._ready)
        self._size -= 1

    def ended(self, active: ActiveRequest) -> None:
        """A request that ran is over: the next one of its session, if any, becomes ready."""
        name = active.session.name
        turns = self._turns[name]
        turns.popleft()
        if turns:
            heapq.heappush(self._ready, (turns[0].arrival, turns[0]))
        else:
            del self._turns[name]

    def remove(self, active: ActiveRequest) -> None:
        """Remove a request that was cancelled while it waited."""
        self._size -= 1
        turns = self._turns[active.session.name]
        if turns[0] is active:
            self._gone.add(active.arrival)
            self.ended(active)
        else:
            turns.remove(active)
