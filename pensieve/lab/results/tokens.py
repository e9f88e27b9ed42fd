"""The Parquet artifact of kind `tokens`, which holds every output token of a trial, and the comparison of two of them."""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pensieve.core.request import TokenArray
from pensieve.errors import ResultsError
from pensieve.serve.record import TurnRecord

MOST_TURNS = 100_000
"""Tokens of a trial with more turns are not kept."""

_FLUSH_TOKENS = 200_000


class TokenFile:
    """Writes the tokens of turns as they finish; the complete file appears at `path` when it is closed.

    Columns: session, turn, position (of the token in the turn's output, from 0), token_id, margin (top logit less the
    second; null where the engine does not tell), emitted_s (clock of the trial; null where unknown).
    As a context manager it leaves no file if the block raises. Raises ResultsError where the disk refuses.
    """

    def __init__(self, path: Path, most_turns: int = MOST_TURNS) -> None:
        self.path = path
        self.turns = 0
        self._most_turns = most_turns
        self._partial = path.with_name(f".{path.name}.{os.getpid()}")
        self._waiting: list[TurnRecord] = []
        self._tokens = 0  # of them
        self._writer: Any = None

    def add(self, turns: Sequence[TurnRecord]) -> None:
        self.turns += len(turns)
        self._waiting += turns
        self._tokens += sum(len(turn.token_ids) for turn in turns)
        if self._tokens >= _FLUSH_TOKENS:
            with self._undone():
                self._flush()

    def _flush(self) -> None:
        import pyarrow.parquet as pq

        waiting, self._waiting, self._tokens = self._waiting, [], 0
        if not waiting or self.turns > self._most_turns:
            return
        batch = _table(waiting)
        if self._writer is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            repeating = ["session", "turn", "position"]  # of the others a dictionary would be as long as they are
            self._writer = pq.ParquetWriter(self._partial, batch.schema, compression="zstd", use_dictionary=repeating)
        self._writer.write_table(batch)

    def close(self) -> Path | None:
        """The file's path; None where there were no turns, or more than are kept."""
        with self._undone():
            self._flush()
            if self._writer is None:
                return None
            writer, self._writer = self._writer, None
            writer.close()
            if self.turns > self._most_turns:
                self._partial.unlink()
                return None
            with self._partial.open("rb") as written:
                os.fsync(written.fileno())  # the database will say that the file is there, also after a power cut
            self._partial.replace(self.path)
        return self.path

    def discard(self) -> None:
        """Delete what was written, also where the disk is full and the file cannot be closed."""
        writer, self._writer, self._waiting = self._writer, None, []
        with suppress(OSError):
            if writer is not None:
                writer.close()
        with suppress(OSError):  # nor may tidying up hide why it is needed
            self._partial.unlink(missing_ok=True)

    @contextmanager
    def _undone(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.discard()
            raise ResultsError(
                f"The tokens cannot be written to {self.path} ({error.strerror or error}); "
                "free some disk space or set PENSIEVE_OUTPUTS to another folder."
            ) from None

    def __enter__(self) -> TokenFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None) -> None:
        self.close() if kind is None else self.discard()


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """token_ids int32 [tokens]; margins float32 [tokens], NaN where not known."""

    token_ids: NDArray[np.int32]
    margins: NDArray[np.float32]


def read_tokens(path: Path) -> dict[tuple[str, int], TurnTokens]:
    """The tokens of each turn, by (session, turn). Raises ResultsError where the file is missing or damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, memory_map=False)
    except FileNotFoundError:
        raise ResultsError(f"The tokens at {path} are gone; run the trial again with force=true.") from None
    except (OSError, pa.ArrowInvalid) as error:
        raise ResultsError(f"The tokens at {path} cannot be read: {str(error).splitlines()[0]}") from None
    session = table["session"].to_numpy()
    turn, position = table["turn"].to_numpy(), table["position"].to_numpy()
    tokens = table["token_id"].to_numpy()
    margins = table["margin"].to_numpy().astype(np.float32)
    starts = np.flatnonzero(position == 0)  # a turn is written in one piece
    stops = np.append(starts[1:], len(position))
    return {
        (str(session[a]), int(turn[a])): TurnTokens(tokens[a:b], margins[a:b])
        for a, b in zip(starts, stops, strict=True)
    }


@dataclass(frozen=True, slots=True)
class TokenComparison:
    """margin: the largest at the first difference of a session (what comes after has another history): a tie in rounding is
    near 0, a fault is not. None where an engine does not tell it: nothing says that it was a tie."""

    turns_compared: int
    turns_differing: int
    margin: float | None


def compare_tokens(path_a: Path, path_b: Path) -> TokenComparison:
    """Compare the tokens of the turns that both files have. Raises ResultsError where one cannot be read."""
    a, b = read_tokens(path_a), read_tokens(path_b)
    shared = sorted(a.keys() & b.keys(), key=lambda key: key[1])
    margins: dict[str, float] = {}
    differing = 0
    for session, turn in shared:
        one, other = a[session, turn], b[session, turn]
        if not np.array_equal(one.token_ids, other.token_ids):
            differing += 1
            shorter = min(len(one.token_ids), len(other.token_ids))
            unequal = np.flatnonzero(one.token_ids[:shorter] != other.token_ids[:shorter])
            position = unequal[0] if len(unequal) else shorter
            told = np.append(one.margins[position : position + 1], other.margins[position : position + 1])
            margins.setdefault(session, float(np.fmin.reduce(told)))  # of one side alone where the other does not tell
    worst = float(np.max([0.0, *margins.values()]))
    return TokenComparison(len(shared), differing, None if math.isnan(worst) else worst)


def _table(turns: Sequence[TurnRecord]) -> Any:
    """NaN, for what an engine does not tell, is null."""
    import pyarrow as pa

    counts = [len(turn.token_ids) for turn in turns]
    of_turn = np.repeat(np.arange(len(counts)), counts)
    margins, emitted_s = (_told([getattr(turn, name) for turn in turns], counts) for name in ("margins", "emitted_s"))
    return pa.table(
        {
            "session": _texts([turn.session for turn in turns]).take(_numbers(of_turn)),
            "turn": _numbers(np.array([turn.turn for turn in turns], np.int32)[of_turn]),
            "position": _numbers(np.concatenate([np.arange(count, dtype=np.int32) for count in counts])),
            "token_id": _numbers(np.frombuffer(b"".join([turn.token_ids.tobytes() for turn in turns]), np.int32)),
            "margin": _numbers(margins.astype(np.float32)),
            "emitted_s": _numbers(emitted_s),
        }
    )


def _numbers(values: NDArray[Any]) -> Any:
    """An Arrow array, null where a value is NaN. Made of buffers: pyarrow.array imports pandas first, for half a second."""
    import pyarrow as pa

    known = ~np.isnan(values)
    bits = None if known.all() else pa.py_buffer(np.packbits(known, bitorder="little"))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [bits, pa.py_buffer(values)])


def _texts(values: Sequence[str]) -> Any:
    import pyarrow as pa

    encoded = [text.encode() for text in values]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    return pa.StringArray.from_buffers(len(encoded), pa.py_buffer(ends), pa.py_buffer(b"".join(encoded)))


def _told(values: Sequence[TokenArray[float]], counts: Sequence[int]) -> NDArray[np.float64]:
    """The values of all tokens; NaN for what an engine does not tell."""
    unknown = array("d", [math.nan])
    whole = [own[:count] + unknown * (count - len(own)) for own, count in zip(values, counts, strict=True)]
    return np.frombuffer(b"".join([own.tobytes() for own in whole]))
