"""A request on its way through the engine."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pensieve.cache.base import Run
from pensieve.request import Forced, Request, TokenArray, TurnRecord, tokens_of
from pensieve.session import Session, common_prefix
from pensieve.stop import StopSearch


@dataclass(slots=True, eq=False)
class Sequence:
    """arrival: its place in the order of arrival, kept when it is preempted. work: positions without KV, ascending; the last
    one ends at the last known token, so a decode is a work list of one position. slot: the worker's, while running.
    length_before and computed_before: of the conversation at admission, to which a turn that is undone returns; replaced:
    its tokens beyond, which an edited prompt put others in place of. stop: looks for the stop strings, where there are any.

    in_flight: launched plans that it has a part in. awaited: tokens that those plans sample. Its blocks and its slot stay
    its own until nothing of it is in flight; closed: over for whoever asked, and waiting for that.
    """

    request: Request
    record: TurnRecord
    arrival: int
    session: Session
    noise_key: int
    work: deque[Run] = field(default_factory=deque)
    work_tokens: int = 0
    slot: int | None = None
    length_before: int = 0
    computed_before: int = 0
    replaced: TokenArray[int] = field(default_factory=lambda: tokens_of([]))
    stop: StopSearch | None = None
    preempted: bool = False
    in_flight: int = 0
    awaited: int = 0
    closed: bool = False

    @property
    def decoding(self) -> bool:
        """One position is left and it is a token this turn sampled, or is about to."""
        return self.work_tokens == 1 and (self.awaited > 0 or len(self.record.token_ids) > 0)

    @property
    def generated(self) -> int:
        return len(self.record.token_ids)

    def set_work(self, runs: tuple[Run, ...]) -> None:
        self.work = deque(runs)
        self.work_tokens = sum(stop - start for start, stop in runs)

    def decode_next(self) -> None:
        """The next token's position is the work that is left, unless the tokens awaited are the last ones."""
        awaited = self.awaited
        if len(self.record.token_ids) + awaited < self.request.output.max_new_tokens:
            position = len(self.session.tokens) - 1 + awaited
            self.work.clear()
            self.work.append((position, position + 1))
            self.work_tokens = 1

    def awaited_token(self) -> int | None:
        """The token that is being sampled, where the request says it ahead."""
        output = self.request.output
        return output.tokens[self.generated + self.awaited - 1] if isinstance(output, Forced) else None

    def take(self, count: int) -> tuple[Run, ...]:
        """Remove the first `count` positions of the work and return them as runs."""
        runs: list[Run] = []
        self.work_tokens -= count
        while count:
            start, stop = self.work.popleft()
            used = min(stop - start, count)
            runs.append((start, start + used))
            count -= used
            if start + used < stop:
                self.work.appendleft((start + used, stop))
        return tuple(runs)

    def kept(self) -> int:
        """Leading tokens of the conversation that the prompt keeps. The last prompt token is always computed anew, since
        its logits give the first output token."""
        held, prompt = self.session.tokens, self.request.prompt
        if self.request.continues:
            return len(held) if prompt else len(held) - 1
        return min(common_prefix(held, prompt), len(prompt) - 1)

    def suffix(self, keep: int) -> TokenArray[int]:
        """The tokens of the prompt after the first `keep`."""
        if self.request.continues:
            return self.request.prompt or self.session.tokens[keep:]
        return self.request.prompt[keep:]

    def prompt_length(self) -> int:
        return len(self.request.prompt) + (len(self.session.tokens) if self.request.continues else 0)
