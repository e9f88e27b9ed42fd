"""The text of a reply while it grows: pieces that together are the text of all of its tokens, up to the stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pensieve.core.stop import before_stop

_CUT_AT = 64  # tokens that are decoded together before their front is given up
_KEPT = 8  # tokens behind that cut, decoded again with what follows: a tokenizer may join neighbours
_UNDECIDED = "\ufffd"


class TextStream:
    """`push` gives the text that can no longer change, `finish` the rest.

    A token may be half a character, whose text is then one replacement character at the end; and the text may end with the
    beginning of a stop string. Both are held back until the next token decides.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, tuple(stops)
        self._ids: list[int] = []  # not given up yet
        self._before = ""  # the text of what was given up
        self._told = 0  # characters that were handed out
        self._ended = False  # a stop string was found

    @property
    def text(self) -> str:
        """The whole text so far, with the part that is held back."""
        return before_stop(self._before + self._decode(self._ids), self._stops)

    def push(self, token: int) -> str:
        """The next token; returns what can be handed out now, possibly nothing."""
        self._ids.append(token)
        if self._ended:
            return ""
        whole = self._before + self._decode(self._ids)
        text = before_stop(whole, self._stops)
        if len(text) < len(whole):
            self._ended = True
            return self._hand_out(text)
        decided = whole[:-1] if whole.endswith(_UNDECIDED) else whole
        held = max((_overlap(decided, stop) for stop in self._stops), default=0)
        piece = self._hand_out(decided[: len(decided) - held])
        if len(self._ids) >= _CUT_AT:
            self._cut(whole)
        return piece

    def finish(self) -> str:
        """Return the text that was held back."""
        return self._hand_out(self.text)

    def _hand_out(self, text: str) -> str:
        piece = text[self._told :]
        self._told = max(self._told, len(text))
        return piece

    def _cut(self, whole: str) -> None:
        """Give up the front, where the text of the rest is the end of the text of all."""
        kept = self._ids[-_KEPT:]
        end = self._decode(kept)
        if end and not end.startswith(_UNDECIDED) and whole.endswith(end):
            self._before, self._ids = whole[: len(whole) - len(end)], kept


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of the text that a stop string may begin with."""
    for count in range(min(len(stop) - 1, len(text)), 0, -1):
        if stop.startswith(text[-count:]):
            return count
    return 0
