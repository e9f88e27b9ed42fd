"""Finished turns as columns, kept in a file without a name: one column is read at a time, and memory holds none of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from tempfile import TemporaryFile
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pensieve.serve.books.holding import TIERS
from pensieve.serve.record import TurnRecord, is_measured

Floats = NDArray[np.float64]
Places = NDArray[np.int64]
Mask = NDArray[np.bool_]

HITS = ("gpu_hit_tokens", "cpu_hit_tokens", "disk_hit_tokens", "shared_hit_tokens")
_WORDS = ("session", "label", "phase", "status", "finish_reason", "error")
_NUMBERS = (
    *("turn", "iteration", "stream", "intended_s", "arrived_s", "admitted_s", "first_token_s", "finished_s"),
    *("queue_ms", "ttft_ms", "latency_ms", "prompt_tokens", "output_tokens", "history_tokens", *HITS),
    *("recomputed_tokens", "resumed_recomputed_tokens", "recomputed_s", "h2d_bytes", "sent_bytes", "received_bytes"),
    *("elsewhere_tokens", "anywhere_tokens", "unexplained_tokens"),
)
_SAVED = tuple(f"saved_{tier}_s" for tier in TIERS)
_PLACES = {name: place for place, name in enumerate((*_WORDS, *_NUMBERS, *_SAVED, "emitted", "last_token_s"))}
_KEPT = attrgetter(*_WORDS, *_NUMBERS)


class _Block(NamedTuple):
    """Turns that were added together. columns: their bytes, one column after the other, or where these begin in the file.
    times_s: likewise those of their tokens, of which there are `times`."""

    turns: int
    columns: bytes | int
    times: int
    times_s: bytes | int


class TurnLog:
    """Turns in the order in which they finished. Where the file has no room, memory holds what it cannot."""

    def __init__(self) -> None:
        self._file = TemporaryFile(buffering=0)  # noqa: SIM115 (closed with the last reader)
        self._end = 0
        self._blocks: list[_Block] = []
        self._codes: dict[str, dict[str | None, int]] = {name: {} for name in _WORDS}

    def add(self, turns: Sequence[TurnRecord]) -> None:
        if not turns:
            return
        columns = np.empty((len(_PLACES), len(turns)))
        for place, values in enumerate(zip(*map(_KEPT, turns), strict=True)):
            if place < len(_WORDS):
                codes = self._codes[_WORDS[place]]
                columns[place] = [codes.setdefault(word, len(codes)) for word in values]
            else:
                columns[place] = values  # None as NaN
        for place, name in enumerate(_SAVED):
            columns[_PLACES[name]] = [turn.saved_s[place] if turn.saved_s else np.nan for turn in turns]
        columns[-2] = [len(turn.emitted_s) for turn in turns]
        columns[-1] = [turn.emitted_s[-1] if turn.emitted_s else turn.finished_s for turn in turns]
        times_s = b"".join([turn.emitted_s.tobytes() for turn in turns])
        self._blocks.append(_Block(len(turns), self._kept(columns.tobytes()), len(times_s) // 8, self._kept(times_s)))

    def _kept(self, data: bytes) -> bytes | int:
        place, written = self._end, 0
        try:
            while written < len(data):
                written += os.pwrite(self._file.fileno(), data[written:], place + written)
        except OSError:
            return data
        self._end += written
        return place

    def _read(self, where: bytes | int, first: int, count: int) -> Floats:
        """So many numbers, from that number of a piece on."""
        if isinstance(where, bytes):
            return np.frombuffer(where, count=count, offset=8 * first)
        parts: list[bytes] = []
        place, left = where + 8 * first, 8 * count
        while left:
            parts.append(os.pread(self._file.fileno(), left, place))
            assert parts[-1], "nobody else has the file"
            place, left = place + len(parts[-1]), left - len(parts[-1])
        return np.frombuffer(b"".join(parts))

    def __len__(self) -> int:
        return sum(block.turns for block in self._blocks)

    def column(self, name: str) -> Floats:
        place = _PLACES[name]
        parts = [self._read(block.columns, place * block.turns, block.turns) for block in self._blocks]
        return np.concatenate([np.empty(0), *parts])

    def words(self, name: str) -> list[str | None]:
        """Those that a column has, by the numbers that stand for them there."""
        return list(self._codes[name])

    def times_s(self) -> Iterator[tuple[slice, Floats]]:
        """Turns that were added together, and the times of all their tokens."""
        first = 0
        for block in self._blocks:
            yield slice(first, first + block.turns), self._read(block.times_s, 0, block.times)
            first += block.turns


class Turns:
    """Turns of a log, all or some, in the order in which they finished.

    turns[name]: a column of table `turn`, or what else a record has: floats [turns], NaN where it is None. Of a column of
    words, numbers that stand for them (`words`). saved_*_s: TurnRecord.saved_s by tier. last_token_s: the time of the last
    token; where tokens have none, when the turn ended.
    """

    def __init__(self, log: TurnLog, chosen: Places | None = None) -> None:
        self._log, self._chosen = log, chosen

    @classmethod
    def of(cls, records: Iterable[TurnRecord]) -> Turns:
        log = TurnLog()
        log.add(list(records))
        return cls(log)

    def __len__(self) -> int:
        return len(self._log) if self._chosen is None else len(self._chosen)

    def __getitem__(self, name: str) -> Floats:
        column = self._log.column(name)
        return column if self._chosen is None else column[self._chosen]

    def codes(self, name: str) -> Places:
        """A column of words, as the numbers of the words."""
        return self[name].astype(np.int64)

    def words(self, name: str) -> list[str | None]:
        """The words by their numbers; some may stand in other turns of the log alone."""
        return self._log.words(name)

    def word(self, name: str, place: int) -> str:
        """That of one turn."""
        return self.words(name)[self.codes(name)[place]] or ""

    def that(self, name: str, wanted: Callable[[str], bool]) -> Mask:
        """Where a column has a word of which this holds."""
        return np.array([word is not None and wanted(word) for word in self.words(name)], bool)[self.codes(name)]

    def where(self, wanted: Mask) -> Turns:
        places = np.flatnonzero(wanted)
        return Turns(self._log, places if self._chosen is None else self._chosen[places])

    @property
    def measured(self) -> Turns:
        return self.where(self.that("phase", is_measured))

    @property
    def completed(self) -> Turns:
        return self.where(self.that("status", "completed".__eq__))

    def gaps_s(self) -> Iterator[tuple[Floats, Places]]:
        """Seconds from each token to the next, some thousand turns at a time, and how many there are of each turn."""
        counts = self._log.column("emitted").astype(np.int64)
        wanted = np.full(len(counts), self._chosen is None)
        if self._chosen is not None:
            wanted[self._chosen] = True
        for turns, times_s in self._log.times_s():
            of_turn = np.repeat(np.arange(turns.start, turns.stop), counts[turns])
            inside = (of_turn[1:] == of_turn[:-1]) & wanted[of_turn[1:]]
            yield np.diff(times_s)[inside], np.maximum(counts[turns][wanted[turns]] - 1, 0)
