"""Stop strings: where a reply ends, token by token and in its whole text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_WINDOW = 16  # tokens at the end that are decoded anew with each one
_TRIES = 8  # places where the text may be cut, since not every place will do
_DECIDED = 4  # characters after a cut: the first of them cannot be half a character any more


class StopSearch:
    """Tells at each token whether the text so far holds a stop string, as if all of it were decoded anew.

    A token's text may depend on its neighbours: half a character, a space that only a first word loses. So the last tokens
    are decoded together, and their front is given up only where the text of the rest is the end of the text of both.
    Tokens without any text (special ones, ids that the tokenizer does not know) are not kept at all: however many there
    are, what stands before and behind them is next to each other.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self._decode, self._stops = decode, stops
        self._overlap = max(map(len, stops)) - 1  # characters of a stop string that may stand in what was given up
        self._settled = ""  # the last of those
        self._ids: list[int] = []
        self._cut_at = 2 * _WINDOW

    def push(self, token: int) -> bool:
        """The next token; True once the text of all of them holds a stop string."""
        if not self._decode((token, token)):  # twice, since some tokenizers drop a single space at the start
            return False
        self._ids.append(token)
        text = self._decode(self._ids)
        if any(stop in self._settled + text for stop in self._stops):
            return True
        if len(self._ids) >= self._cut_at:
            self._cut(text)
        return False

    def _cut(self, text: str) -> None:
        for count in range(_WINDOW, _WINDOW + _TRIES):
            kept = self._ids[-count:]
            end = self._decode(kept)
            if len(end) >= _DECIDED and text.endswith(end):
                settled = self._settled + text[: len(text) - len(end)]
                self._settled = settled[len(settled) - self._overlap :] if len(settled) > self._overlap else settled
                self._ids, self._cut_at = kept, count + _WINDOW
                return
        self._cut_at = 2 * len(self._ids)


def before_stop(text: str, stops: Sequence[str]) -> str:
    """The text up to the first stop string in it; all of it where there is none."""
    return text[: min((found for stop in stops if (found := text.find(stop)) >= 0), default=len(text))]
