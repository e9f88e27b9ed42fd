"""Which stretch of a replay its throughput is measured over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pensieve.record import TurnRecord

FEWEST_TURNS = 20
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
    measured: Sequence[TurnRecord],
    *,
    load: str,
    warm_s: float,
    arrivals_s: Mapping[str, float],
    out_of_work_s: float | None,
) -> Window:
    """The window of the `measured` turns (no warm-up among them).

    warm_s: when the last warm-up turn ended. arrivals_s: the first intended arrival of each measured conversation.
    out_of_work_s: when the first user of a closed load had nothing left to ask. A trial too short for its window is
    measured whole, and a flag says so.
    """
    if not measured:
        return Window(warm_s, warm_s, warm_s, warm_s, 0.0, {"window": "No measured turn ran."})
    flags: dict[str, str] = {}
    measured_from = min(arrivals_s.values())
    ended = max(_finished(turn) for turn in measured)
    start = max(warm_s, measured_from)
    if load == "closed":
        end = ended if out_of_work_s is None else out_of_work_s
    else:
        end = min(ended, max(arrivals_s.values()))
        steady = start + STEADY_AFTER * _mean_duration(measured, arrivals_s)
        if steady < end:
            start = steady
        else:
            flags["not_steady"] = (
                "Conversations arrived for less than three mean conversation durations, so the start-up is not left out."
            )
    inside = _completed_between(measured, start, end)
    if inside < FEWEST_TURNS:
        flags["window"] = (
            f"Only {inside} turns finished in the measurement window; throughput is over all measured turns, "
            "with start-up and drain."
        )
        start, end = measured_from, ended
    middle = (start + end) / 2
    first, second = _output_tokens(measured, start, middle), _output_tokens(measured, middle, end)
    if first + second and abs(first - second) / ((first + second) / 2) > HALVES_MAY_DIFFER:
        flags["halves"] = (
            f"The two halves of the window gave {first} and {second} output tokens: the load was not steady."
        )
    everything = _output_tokens(measured, float("-inf"), ended)
    drain = _output_tokens(measured, end, ended) / everything if everything else 0.0
    return Window(start, end, measured_from, ended, drain, flags)


def _finished(turn: TurnRecord) -> float:
    assert turn.finished_s is not None
    return turn.finished_s


def _mean_duration(measured: Sequence[TurnRecord], arrivals_s: Mapping[str, float]) -> float:
    last: dict[str, float] = {}
    for turn in measured:
        last[turn.session] = max(_finished(turn), last.get(turn.session, 0.0))
    return sum(last[session] - arrivals_s[session] for session in last) / len(last)


def _completed_between(turns: Sequence[TurnRecord], start: float, end: float) -> int:
    return sum(turn.status == "completed" and start <= _finished(turn) <= end for turn in turns)


def _output_tokens(turns: Sequence[TurnRecord], after: float, until: float) -> int:
    """Of completed turns that finished in (after, until]."""
    return sum(turn.output_tokens for turn in turns if turn.status == "completed" and after < _finished(turn) <= until)
