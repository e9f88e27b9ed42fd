"""The finished turns of a replay as columns, and what of them is measured: the window of their throughput, and the stretches
over which their system's counts are taken.

Columns are in a file without a name: one is read at a time, and memory holds none of them. The window of an open load is
fixed by when its conversations arrive, and by nothing that the system does: all baselines of a seed are measured over the
same one, however fast each is. What a system made of it is said by flags.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from tempfile import TemporaryFile
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pensieve.core.request import Request
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

FEWEST_TURNS = 20
START_UP = 0.5  # of the time in which an open load's conversations arrive: the engine fills up, and is not measured
STEADY_AFTER = 3  # mean conversation durations until an open load no longer remembers its empty start
HALVES_MAY_DIFFER = 0.05


class _Block(NamedTuple):
    """Turns that were added together. columns: where theirs begin in the file, one after the other. times_s: where those of
    their tokens do, of which there are `times`."""

    turns: int
    columns: int
    times: int
    times_s: int


class TurnLog:
    """Turns in the order in which they finished. Raises OSError where the disk is full."""

    def __init__(self) -> None:
        self._file = TemporaryFile()  # noqa: SIM115 (closed with the last reader)
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

    def _kept(self, data: bytes) -> int:
        """Where it begins in the file."""
        place = self._file.seek(0, os.SEEK_END)
        self._file.write(data)
        return place

    def _read(self, where: int, first: int, count: int) -> Floats:
        """So many numbers, from that number of a piece on."""
        self._file.seek(where + 8 * first)
        return np.frombuffer(self._file.read(8 * count))

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


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds since the replay began. drain_share: of the measured output tokens, those finished after end_s."""

    start_s: float
    end_s: float
    measured_from_s: float
    ended_s: float
    drain_share: float
    flags: Mapping[str, str] = field(default_factory=dict)


def find_window(
    measured: Turns,
    *,
    load: str,
    warm_s: float,
    arrivals_s: Mapping[str, float],
    out_of_work_s: float | None,
) -> Window:
    """The window of the `measured` turns (no warm-up among them), after the warm-up.

    Open load: the second half of the time in which conversations arrive; `arrivals_s` is the first intended arrival of each
    measured one. Closed load: until the first user had nothing left to ask (out_of_work_s). A load too small for its window
    is measured whole, and a flag says so. warm_s: when the last warm-up turn ended.
    """
    if not len(measured):
        return Window(warm_s, warm_s, warm_s, warm_s, 0.0, {"window": "No measured turn ran."})
    flags: dict[str, str] = {}
    first, last = min(arrivals_s.values()), max(arrivals_s.values())
    finished_s, sessions = measured["finished_s"], measured.codes("session")
    completed = measured.that("status", "completed".__eq__)
    outputs = np.where(completed, measured["output_tokens"], 0.0)
    ended = float(finished_s.max())

    def completed_between(start_s: float, end_s: float) -> int:
        return int((completed & (start_s <= finished_s) & (finished_s <= end_s)).sum())

    def tokens_between(start_s: float, end_s: float) -> int:
        """As throughput counts them."""
        return int(outputs[(start_s <= finished_s) & (finished_s <= end_s)].sum())

    if load == "closed":
        start, end = max(warm_s, first), ended if out_of_work_s is None else out_of_work_s
        enough = completed_between(start, end) >= FEWEST_TURNS
        lacking = f"fewer than {FEWEST_TURNS} turns finished before the first user had nothing left to ask"
    else:
        start, end = first + START_UP * (last - first), last
        enough = sum(start <= at <= end for at in arrivals_s.values()) >= FEWEST_TURNS
        lacking = f"fewer than {FEWEST_TURNS} conversations arrive in the second half of the arrivals"
    if not enough:
        flags["window"] = f"Throughput is over all measured turns, with start-up and drain: {lacking}."
        start, end = first, ended
    elif load != "closed":
        last_s = np.zeros(sessions.max() + 1)
        np.maximum.at(last_s, sessions, finished_s)
        words = measured.words("session")
        lasted_s = [last_s[session] - arrivals_s[words[session] or ""] for session in np.unique(sessions)]
        duration = sum(lasted_s) / len(lasted_s)
        if start - first < STEADY_AFTER * duration:
            flags["not_steady"] = (
                f"The start-up left out, {start - first:.3g} s, is shorter than three mean conversation durations of "
                f"{duration:.3g} s."
            )
        if warm_s > start:
            flags["late_warmup"] = "Warm-up turns were still running when the measurement window began."
        inside = completed_between(start, end)
        if inside < FEWEST_TURNS:
            flags["few_turns"] = f"Only {inside} turns finished in the measurement window of {end - start:.3g} s."
    middle = (start + end) / 2
    late = tokens_between(middle, end)
    early = tokens_between(start, end) - late
    if enough and early + late and abs(early - late) / ((early + late) / 2) > HALVES_MAY_DIFFER:
        flags["halves"] = (
            f"The two halves of the window gave {early} and {late} output tokens: the load was not steady."
        )
    everything, in_time = (tokens_between(float("-inf"), until) for until in (ended, end))
    drain = (everything - in_time) / everything if everything else 0.0
    return Window(start, end, first, ended, drain, flags)


class MeasuredStretches:
    """What the system counted while it served measured turns.

    A stretch begins when a measured turn is sent. It ends when a turn that prepares others is sent while no measured one
    is under way: until then what the system does, such as copies ahead of time, is still for the measured ones. So warm-up
    before the first measured turn and re-warming between two count nothing, and a turn that is warmed beside a measured one
    counts with it.

    read: the system's counts since its start.
    """

    def __init__(self, read: Callable[[], Mapping[str, float]]) -> None:
        self._read = read
        self._before: Mapping[str, float] | None = None  # the counts when the stretch began
        self._sum: dict[str, float] = {}
        self._under_way: set[int] = set()

    def sending(self, request: Request) -> None:
        """Record that the request is about to be sent; called before the system has it."""
        if is_measured(request.phase):
            self._under_way.add(request.id)
            if self._before is None:
                self._before = dict(self._read())
        elif not self._under_way:
            self._end()

    def finished(self, request: Request) -> None:
        self._under_way.discard(request.id)

    def counts(self) -> dict[str, float]:
        """End the last stretch, and return the counts of all. Empty where no measured turn was sent."""
        self._end()
        return dict(self._sum)

    def _end(self) -> None:
        if self._before is not None:
            for name, value in self._read().items():
                self._sum[name] = self._sum.get(name, 0.0) + value - self._before.get(name, 0.0)
            self._before = None
