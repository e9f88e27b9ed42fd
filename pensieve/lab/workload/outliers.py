"""Recorded times that cannot be right: a few requests so far from all others that a replay would mostly wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pensieve.errors import MalformedInput
from pensieve.lab.workload.formats.reading import OnMalformed
from pensieve.lab.workload.recording import Call, Conversation

AWAY_S = 3600.0
AWAY_SPANS = 10
"""An outlier lies at least so many seconds, and so many times the length of all that is left, from its nearest neighbour."""
FEW = 0.01
"""of the requests may be outliers together; more of them are a part of the recording, and what lies between is a pause."""


def without_outliers(
    conversations: Sequence[Conversation], on_malformed: OnMalformed, path: str
) -> tuple[Sequence[Conversation], int]:
    """Timed conversations without the calls whose times are outliers, and how many those were.

    Raises MalformedInput for an outlier with on_malformed="fail".
    """
    calls = sorted((call for one in conversations for call in one.calls), key=_at)
    first, last = _inner([_at(call) for call in calls])
    outliers = calls[:first] + calls[last:]
    if not outliers:
        return conversations, 0
    if on_malformed == "fail":
        inside = f"{_at(calls[first]):,.6g} s and {_at(calls[last - 1]):,.6g} s"
        raise MalformedInput(
            f"{path}: a request at {_at(outliers[-1]):,.6g} s after the first one lies far from the other "
            f"{last - first:,}, which are between {inside}: a replay would wait for it. Correct the time, name the requests "
            "you want with workload.window_start_s and workload.window_s, or set workload.on_malformed=skip to leave such "
            "requests out and have them counted."
        )
    low, high = _at(calls[first]), _at(calls[last - 1])
    kept = [(one, tuple(call for call in one.calls if low <= _at(call) <= high)) for one in conversations]
    return [replace(one, calls=inside) for one, inside in kept if inside], len(outliers)


def _inner(times: list[float]) -> tuple[int, int]:
    """[first, last) of the sorted times, without outliers at either end."""
    first, last = 0, len(times)
    most = max(1, int(FEW * len(times)))
    if last < 3:
        return first, last
    for count in range(most, 0, -1):
        rest = times[-count - 1] - times[0]
        if times[-count] - times[-count - 1] > max(AWAY_S, AWAY_SPANS * rest):
            last -= count
            break
    for count in range(most, 0, -1):
        if count + 1 >= last:
            continue
        rest = times[last - 1] - times[count]
        if times[count] - times[count - 1] > max(AWAY_S, AWAY_SPANS * rest):
            first = count
            break
    return first, last


def _at(call: Call) -> float:
    assert call.at_s is not None
    return call.at_s
