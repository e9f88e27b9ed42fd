"""What passes between a trial and the processes that a model is divided among: a setup, then commands and their answers.

A plan goes out once an iteration, and so as plain tuples: pickle takes microseconds for every frozen dataclass with slots,
which came to a millisecond for the rows of a batch of 64, and to a fortieth of that for tuples (docs/tensor_parallel.md).
"""

from __future__ import annotations

import pickle
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pensieve.core.plan import Move, Row, Sample, StepPlan
from pensieve.device.asked import ModelAsked
from pensieve.errors import PensieveError

if TYPE_CHECKING:
    from pensieve.device.options import TorchOptions

# A command is a letter, and then what it needs.
LAUNCH, COLLECT, START, ROOM, FORGET = b"L", b"C", b"S", b"R", b"F"

_LENGTH = struct.Struct("<Q")
_SENT = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class Setup:
    """What all ranks start from. asked: the model, with the threads of each; its device does not count. devices: one a rank,
    "cpu" or "cuda:N". store: the file by which they find each other, which TensorParallelWorker names."""

    asked: ModelAsked
    devices: tuple[str, ...]
    options: TorchOptions
    store: Path | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """The last answer: nothing comes after it."""

    error: PensieveError


def launch(plan: StepPlan) -> bytes:
    """The command to launch a plan, with the time on the clock that all processes of a machine share (perf_counter_ns).

    It has all that a torch worker reads, not what only a simulated one repeats.
    """
    sent = _SENT.pack(time.perf_counter_ns())
    assert plan.repeat == 1
    rows = tuple((row.slot, row.runs, row.tokens, _sample(row.sample)) for row in plan.rows)
    moves = tuple((m.ticket, m.source, m.target, m.src, m.dst, m.keys, m.urgent) for m in plan.moves)
    whole = (plan.step, rows, plan.tables, moves)
    return LAUNCH + sent + pickle.dumps(whole, pickle.HIGHEST_PROTOCOL)


def launched(command: bytes) -> tuple[StepPlan, int]:
    """The plan of such a command, and when it was sent."""
    (sent_ns,) = _SENT.unpack_from(command, len(LAUNCH))
    step, rows, tables, moves = pickle.loads(memoryview(command)[len(LAUNCH) + _SENT.size :])
    return StepPlan(
        step,
        tuple(
            Row(slot, runs, tokens, None if sample is None else Sample(*sample)) for slot, runs, tokens, sample in rows
        ),
        tables,
        tuple(Move(*move) for move in moves),
    ), sent_ns


def _sample(sample: Sample | None) -> tuple[Any, ...] | None:
    if sample is None:
        return None
    return (sample.position, sample.key, sample.temperature, sample.top_p, sample.top_k)


def send(stream: IO[bytes], data: bytes) -> None:
    """One message."""
    stream.write(_LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes | None:
    """The next message; None where the other end is gone."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = stream.read(length)
    return data if len(data) == length else None
