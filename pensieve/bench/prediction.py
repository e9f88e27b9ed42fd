"""What a roofline predicts for a serving cell: how many times more turns a second keeping all KV gives than keeping none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pensieve.cost.roofline import Roofline


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens of one turn: already in the conversation, new in the prompt, generated."""

    history: int
    new: int
    output: int


def turn_s(roofline: Roofline, turns: Sequence[Turn], batch: int, keeps: bool) -> float:
    """Mean seconds of device time a turn when `batch` conversations decode together.

    keeps: all history is found in GPU memory (the all-hit limit); otherwise all of it is computed again. A prompt is
    computed by itself, a decode step of the batch is shared evenly.
    """
    assert turns and batch >= 1
    total = 0.0
    for turn in turns:
        start = turn.history if keeps else 0
        context = turn.history + turn.new
        total += roofline.iteration_s([(start, context)], 1)
        middle = context + turn.output // 2
        total += turn.output * roofline.iteration_s([(middle, middle + 1)] * batch, batch) / batch
    return total / len(turns)


def all_hit_ratio(roofline: Roofline, turns: Sequence[Turn], batch: int) -> float:
    """Turns a second with every history found, over turns a second with every history computed again."""
    return turn_s(roofline, turns, batch, keeps=False) / turn_s(roofline, turns, batch, keeps=True)
