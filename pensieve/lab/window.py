"""What of a replay is measured: the window of its throughput, and the stretches over which its system's counts are taken.

The window of an open load is fixed by when its conversations arrive, and by nothing that the system does: all baselines of
a seed are measured over the same one, however fast each is. What a system made of it is said by flags.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from pensieve.core.request import Request
from pensieve.lab.turns import Turns
from pensieve.serve.record import is_measured

FEWEST_TURNS = 20
START_UP = 0.5  # of the time in which an open load's conversations arrive: the engine fills up, and is not measured
STEADY_AFTER = 3  # mean conversation durations until an open load no longer remembers its empty start
HALVES_MAY_DIFFER = 0.05


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
        if inside == 0:
            flags["none_in_window"] = (
                f"No turn finished in the measurement window of {end - start:.3g} s, so there is no throughput; "
                "makespan_output_tok_s counts all of them."
            )
        elif inside < FEWEST_TURNS:
            flags["few_turns"] = f"Only {inside} turns finished in the measurement window."
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
