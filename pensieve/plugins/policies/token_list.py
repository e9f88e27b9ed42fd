"""Sessions in the order in which they were listed, with the tokens of each and of all: what directories are made of."""

from __future__ import annotations

from collections import OrderedDict


class TokenList:
    """Sessions by number, the one listed first in front."""

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

    def resize(self, number: int, tokens: int) -> None:
        """It keeps its place."""
        self.total += tokens - self._tokens[number]
        self._tokens[number] = tokens

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
