"""The finished turns of a replay: the first some thousand and the last of them in memory, all others in a file, read back as
they are asked for."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import islice
from typing import overload

from pensieve.serve.record import ScratchFile, StoredTimes, TurnRecord

_HELD = 20_000  # turns that stay in memory, some 30 MB: most trials have no more, and are summarised in many passes


class _Passed(Sequence[TurnRecord]):
    """Turns that are gone through; one by its number costs as much as all before it."""

    @overload
    def __getitem__(self, index: int) -> TurnRecord: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TurnRecord]: ...
    def __getitem__(self, index: int | slice) -> TurnRecord | Sequence[TurnRecord]:
        if isinstance(index, slice):
            return list(self)[index]
        return next(islice(self, range(len(self))[index], None))


class TurnLog(_Passed):
    """Turns in the order in which they finished. `store` drops the token ids and margins of those that came since, moves
    their times to the file, and but for the first `held` turns the rest of them too. What is read back is for reading
    only."""

    def __init__(self, held: int = _HELD) -> None:
        self._held = held
        self.recent: list[TurnRecord] = []
        self._batches: list[
            tuple[int, int] | list[TurnRecord]
        ] = []  # where they begin in the file and how long they are
        self._stored = 0

    @cached_property
    def _file(self) -> ScratchFile:
        return ScratchFile()

    def append(self, turn: TurnRecord) -> None:
        self.recent.append(turn)

    def store(self) -> None:
        """Where there is no room in the file they stay in memory."""
        if not self.recent:
            return
        batch: tuple[int, int] | list[TurnRecord] = self.recent
        with suppress(OSError):
            for turn in self.recent:
                turn.drop_tokens(self._file)
            if self._stored + len(self.recent) > self._held:
                written = self._written(self.recent)
                batch = self._file.append(written), len(written)
        self._batches.append(batch)
        self._stored += len(self.recent)
        self.recent = []

    @staticmethod
    def _written(turns: Sequence[TurnRecord]) -> bytes:
        """The turns, and apart from them where their times are: a file is not written into itself."""
        times = [turn.stored for turn in turns]
        for turn in turns:
            turn.stored = None
        data = pickle.dumps((turns, [one and (one.place, one.count) for one in times]), protocol=5)
        for turn, one in zip(turns, times, strict=True):
            turn.stored = one
        return data

    def _read(self, place: int, size: int) -> Iterator[TurnRecord]:
        for turn, times in zip(*pickle.loads(self._file.read(place, size)), strict=True):
            turn.stored = times and StoredTimes(self._file, *times)
            yield turn

    def __len__(self) -> int:
        return self._stored + len(self.recent)

    def __iter__(self) -> Iterator[TurnRecord]:
        for batch in self._batches:
            yield from batch if isinstance(batch, list) else self._read(*batch)
        yield from self.recent


class Chosen(_Passed):
    """Some turns of a log, chosen anew each time that somebody goes through them."""

    def __init__(self, turns: Sequence[TurnRecord], wanted: Callable[[TurnRecord], bool]) -> None:
        self._turns, self._wanted = turns, wanted

    @cached_property
    def _count(self) -> int:
        return sum(1 for _ in self)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[TurnRecord]:
        return filter(self._wanted, self._turns)


def chosen(turns: Sequence[TurnRecord], wanted: Callable[[TurnRecord], bool]) -> Sequence[TurnRecord]:
    """A list, of turns that are in memory anyway."""
    if isinstance(turns, (TurnLog, Chosen)):
        return Chosen(turns, wanted)
    return list(filter(wanted, turns))
