"""What MLflow shows of a trial over its seconds: first tokens by turn, where history was found, what the cache holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple

from pensieve.results.frame import counts
from pensieve.results.store import ENGINE, Reading
from pensieve.statistics import median

LIVE = "live/"  # before the names of these metrics; the section of a run's page in which MLflow draws them
TURNS_SHOWN = 10  # a line each: more could not be told apart
MOST_STEPS = 100


class Served(NamedTuple):
    """What is shown of one turn that counts. Tokens: None where the system does not say what it found."""

    turn: int
    ttft_ms: float | None
    history_tokens: int | None
    gpu_hit_tokens: int | None
    cpu_hit_tokens: int | None
    disk_hit_tokens: int | None = None


def served(turn: Any) -> Served | None:
    """turn: a TurnRecord, or its row. None where it does not count: it prepared others, or did not complete."""
    return Served(*(getattr(turn, name) for name in Served._fields)) if counts(turn) else None


class Series:
    """Everything up to a moment; add what came since, then ask for the values at that moment."""

    def __init__(self) -> None:
        self._ttft_ms: defaultdict[int, list[float]] = defaultdict(list)
        self._changed: set[int] = set()
        self._history = self._gpu = self._cpu = self._disk = 0
        self._turns = 0

    def add(self, turns: Iterable[Served]) -> None:
        for one in turns:
            self._turns += 1
            if one.ttft_ms is not None and one.turn <= TURNS_SHOWN:
                self._ttft_ms[one.turn].append(one.ttft_ms)
                self._changed.add(one.turn)
            if one.history_tokens and one.gpu_hit_tokens is not None:
                self._history += one.history_tokens
                self._gpu += one.gpu_hit_tokens
                self._cpu += one.cpu_hit_tokens or 0
                self._disk += one.disk_hit_tokens or 0

    def values(self, gauges: Mapping[str, float]) -> dict[str, float]:
        """By metric. A turn's median so far stands there when it has changed since the last call; the shares of history are
        of all turns so far. gauges: of this moment."""
        found = {f"{LIVE}{name}": value for name, value in gauges.items()}
        found[f"{LIVE}turns"] = float(self._turns)
        for turn in sorted(self._changed):
            found[f"{LIVE}ttft_ms_p50/turn_{turn:02d}"] = median(self._ttft_ms[turn])
        self._changed.clear()
        if self._history:
            found_tokens = self._gpu + self._cpu + self._disk
            rates = {"gpu": self._gpu, "cpu": self._cpu, "missed": self._history - found_tokens}
            if self._disk:
                rates["disk"] = self._disk
            found |= {f"{LIVE}history/{name}": tokens / self._history for name, tokens in rates.items()}
        return found


def series_of(turns: Sequence[Any], readings: Iterable[Reading]) -> Iterator[tuple[int, dict[str, float]]]:
    """(second, values) of a trial that has ended, at most MOST_STEPS of them."""
    done = sorted(
        ((turn.finished_s, one) for turn in turns if turn.finished_s is not None and (one := served(turn))),
        key=lambda pair: pair[0],
    )
    known = [one for one in readings if one.device == ENGINE and one.value is not None]
    end_s = max([at_s for at_s, _ in done] + [one.at_s for one in known], default=0.0)
    stride = max(1, ceil(end_s / MOST_STEPS))
    series, gauges = Series(), dict[str, float]()
    next_turn = next_reading = 0
    for step in range(stride, ceil(end_s) + stride, stride) if done or known else ():
        begun = next_turn
        while next_turn < len(done) and done[next_turn][0] <= step:
            next_turn += 1
        while next_reading < len(known) and known[next_reading].at_s <= step:
            gauges[known[next_reading].name] = known[next_reading].value or 0.0
            next_reading += 1
        series.add(one for _, one in done[begun:next_turn])
        yield step, series.values(gauges)
