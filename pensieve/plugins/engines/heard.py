"""What an engine of others was asked and has answered in this trial: no more of a prompt can be in a cache that was cold."""

from __future__ import annotations

import threading

from pensieve.core.request import TokenArray
from pensieve.core.session import common_prefix


class Heard:
    """The texts of each conversation, of which none begins with another. Any number of threads ask."""

    def __init__(self) -> None:
        self._texts: dict[str, list[TokenArray[int]]] = {}
        self._lock = threading.Lock()

    def hears(self, session: str, text: TokenArray[int]) -> None:
        """A prompt as soon as it is sent, whatever becomes of it, and again with its answer."""
        with self._lock:
            known = self._texts.get(session, [])
            if all(one[: len(text)] != text for one in known):
                self._texts[session] = [*(one for one in known if one != text[: len(one)]), text]

    def of_session(self, session: str, prompt: TokenArray[int]) -> int:
        """How many leading tokens of the prompt this conversation has said."""
        return _longest(prompt, self._texts.get(session, ()))

    def of_others(self, session: str, prompt: TokenArray[int]) -> int:
        """How many leading tokens of the prompt any other one has said."""
        with self._lock:
            others = [text for name, texts in self._texts.items() if name != session for text in texts]
        return _longest(prompt, others)


def _longest(prompt: TokenArray[int], texts: list[TokenArray[int]] | tuple[()]) -> int:
    return max((common_prefix(prompt, text) for text in texts), default=0)
