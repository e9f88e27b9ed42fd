"""The finished turns of a replay: the first some thousand and the last of them in memory, all others in a file, read back as
they are asked for."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import cached_property
from itertools import islice
from typing import Any, overload

from pensieve.core.request import TokenArray
from pensieve.serve.record import ScratchFile, StoredTimes, TurnRecord

_APART = ("token_ids", "margins", "emitted_s", "stored")  # dropped, or in the file already
_COLUMNS = tuple(field.name for field in fields(TurnRecord) if field.name not in _APART)
_TIMES = "stored"
_HELD = 10_000  # turns that stay in memory, some 15 MB: most trials have no more, and are summarised in many passes


class _Columns:
    """A batch of turns in the file: a column for each field, read when it is first asked for."""

    __slots__ = ("_file", "_known", "_starts", "count")

    def __init__(self, file: ScratchFile, starts: TokenArray[int], count: int) -> None:
        """starts: where each column begins, and where the last one ends."""
        self._file, self._starts, self.count = file, starts, count
        self._known: dict[str, list[Any]] = {}

    @classmethod
    def written(cls, turns: Sequence[TurnRecord], file: ScratchFile) -> _Columns:
        """Raises OSError where there is no room for them."""
        columns = [[getattr(turn, name) for turn in turns] for name in _COLUMNS]
        columns.append([turn.stored and (turn.stored.place, turn.stored.count) for turn in turns])
        parts = [pickle.dumps(column, protocol=5) for column in columns]
        starts = array("q", [file.append(b"".join(parts))])
        for part in parts:
            starts.append(starts[-1] + len(part))
        return cls(file, starts, len(turns))

    def unread(self) -> _Columns:
        """Return the same batch with no column read yet, so that one pass over the file leaves nothing in memory."""
        return _Columns(self._file, self._starts, self.count)

    def column(self, name: str) -> list[Any]:
        values = self._known.get(name)
        if values is None:
            index = _INDEX[name]
            start, stop = self._starts[index : index + 2]
            values = pickle.loads(self._file.read(start, stop - start))
            if name == _TIMES:
                values = [where and StoredTimes(self._file, *where) for where in values]
            self._known[name] = values
        return values


_INDEX = {name: index for index, name in enumerate((*_COLUMNS, _TIMES))}
_DROPPED = {"token_ids": array("i"), "margins": array("d"), "emitted_s": array("d")}


class _StoredTurn(TurnRecord):
    """A turn of a batch in the file. What nobody asks for is not read: none of its fields is set, and so each is looked for
    here."""

    __slots__ = ("_columns", "_place")
    _columns: _Columns
    _place: int

    def __getattr__(self, name: str) -> Any:
        if name in _INDEX:
            return self._columns.column(name)[self._place]
        if name in _DROPPED:
            return _DROPPED[name]
        raise AttributeError(name)


def _turn(columns: _Columns, place: int) -> TurnRecord:
    turn = _StoredTurn.__new__(_StoredTurn)
    turn._columns, turn._place = columns, place
    return turn


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
        self._batches: list[_Columns | list[TurnRecord]] = []
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
        batch: _Columns | list[TurnRecord] = self.recent
        with suppress(OSError):
            for turn in self.recent:
                turn.drop_tokens(self._file)
            if self._stored + len(self.recent) > self._held:
                batch = _Columns.written(self.recent, self._file)
        self._batches.append(batch)
        self._stored += len(self.recent)
        self.recent = []

    def __len__(self) -> int:
        return self._stored + len(self.recent)

    def __iter__(self) -> Iterator[TurnRecord]:
        for batch in self._batches:
            if isinstance(batch, list):
                yield from batch
                continue
            columns = batch.unread()
            for place in range(columns.count):
                yield _turn(columns, place)
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
