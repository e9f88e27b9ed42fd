"""What stands of conversations, as whoever asks knows it: everything said, but for turns that came to nothing."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from pensieve.core.request import Request, TokenArray
from pensieve.core.session import common_prefix
from pensieve.serve.record import TurnRecord


@dataclass(slots=True, eq=False)
class Transcript:
    """One conversation. tokens: all that was said, as its next prompt begins."""

    tokens: TokenArray[int] = field(default_factory=lambda: array("i"), kw_only=True)

    def known(self, prompt: TokenArray[int]) -> int:
        """Leading tokens of the prompt that were computed before. The last token of a turn has no KV: the next one computes
        it."""
        return max(0, min(common_prefix(self.tokens, prompt), len(self.tokens) - 1))


class Transcripts:
    """Those of many conversations, by name."""

    def __init__(self) -> None:
        self._all: dict[str, Transcript] = {}

    def __len__(self) -> int:
        return len(self._all)

    def of(self, session: str) -> Transcript:
        """That of a conversation; an empty one where nothing stands."""
        return self._all.get(session) or Transcript()

    def history_of(self, asked: Request) -> int:
        """Prompt tokens that were said before: all that a cache could have had. The last one is computed in any case."""
        known = self.of(asked.session).known(asked.prompt) if asked.history is None else asked.history.tokens
        return min(known, len(asked.prompt) - 1)

    def note(self, asked: Request, turn: TurnRecord) -> None:
        """A turn has ended: add what was asked and answered, if it stands."""
        if turn.stands:
            self._all[asked.session] = Transcript(tokens=asked.prompt + turn.token_ids)

    def forget(self, session: str | None) -> None:
        """Forget one conversation; None: all."""
        if session is None:
            self._all.clear()
        else:
            self._all.pop(session, None)
