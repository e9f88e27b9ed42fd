"""The Parquet artifact of kind `tokens`: every output token of a trial, and whether two trials gave the same ones."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pensieve.errors import ResultsError
from pensieve.request import TurnRecord

MOST_TURNS = 100_000
"""Of a longer trial the tokens are not kept."""

_FLUSH_TOKENS = 200_000


class TokenFile:
    """Writes the tokens of finished turns as they come; the file appears at `path` when it is closed, whole or not at all.

    Columns: session, turn, position (of the token in the turn's output, from 0), token_id, margin (top logit less the
    second; null where the engine does not tell), emitted_s (clock of the trial; null where unknown).
    As a context manager it keeps nothing where the block raises.
    """

    def __init__(self, path: Path, most_turns: int = MOST_TURNS) -> None:
        self.path = path
        self.turns = 0
        self._most_turns = most_turns
        self._partial = path.with_name(f".{path.name}.{os.getpid()}")
        self._waiting: list[TurnRecord] = []
        self._waiting_tokens = 0
        self._writer: Any = None

    def add(self, turn: TurnRecord) -> None:
        """The record's tokens are copied at the next flush, so they must not be freed before `flush` is called."""
        self.turns += 1
        if self.turns > self._most_turns:
            self._waiting = []
            return
        self._waiting.append(turn)
        self._waiting_tokens += len(turn.token_ids)
        if self._waiting_tokens >= _FLUSH_TOKENS:
            self.flush()

    def flush(self) -> None:
        if not self._waiting:
            return
        import pyarrow.parquet as pq

        batch = _table(self._waiting)
        self._waiting, self._waiting_tokens = [], 0
        try:
            if self._writer is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._writer = pq.ParquetWriter(self._partial, batch.schema, compression="zstd")
            self._writer.write_table(batch)
        except OSError as error:
            raise _cannot_write(self.path, error) from None

    def close(self) -> Path | None:
        """The file's path; None where there were no turns, or more than are kept."""
        self.flush()
        if self._writer is None:
            return None
        try:
            self._writer.close()
            self._writer = None
            if self.turns > self._most_turns:
                self._partial.unlink()
                return None
            self._partial.replace(self.path)
        except OSError as error:
            raise _cannot_write(self.path, error) from None
        return self.path

    def discard(self) -> None:
        self._waiting = []
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            self._partial.unlink(missing_ok=True)

    def __enter__(self) -> TokenFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None) -> None:
        self.close() if kind is None else self.discard()


def write_tokens(path: Path, turns: Iterable[TurnRecord]) -> Path | None:
    """All at once; see TokenFile."""
    with TokenFile(path) as file:
        for turn in turns:
            file.add(turn)
        return file.close()


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """token_ids int32 [tokens]; margins float32 and emitted_s float64 [tokens], NaN where not known."""

    token_ids: NDArray[np.int32]
    margins: NDArray[np.float32]
    emitted_s: NDArray[np.float64]


def read_tokens(path: Path) -> dict[tuple[str, int], TurnTokens]:
    """By (session, turn). Raises ResultsError where the file is missing or damaged."""
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
    emitted = table["emitted_s"].to_numpy().astype(np.float64)
    starts = np.flatnonzero(position == 0)  # a turn is written in one piece
    stops = np.append(starts[1:], len(position))
    return {
        (str(session[a]), int(turn[a])): TurnTokens(tokens[a:b], margins[a:b], emitted[a:b])
        for a, b in zip(starts, stops, strict=True)
    }


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a turn's outputs part. margin: the smaller of the two, None where neither engine tells.

    position: the index of the first token that differs, or that only one of them has.
    """

    session: str
    turn: int
    position: int
    margin: float | None


@dataclass(frozen=True, slots=True)
class TokenComparison:
    """first: the earliest difference by turn, then session. worst: of the first differences of each session (what comes
    after has another history) the one with the largest margin: a tie in rounding is near 0, a fault is not."""

    turns_compared: int
    turns_differing: int
    first: Difference | None = None
    worst: Difference | None = None


def compare_tokens(path_a: Path, path_b: Path) -> TokenComparison:
    """Token for token, over the turns that both files have. Raises ResultsError where one cannot be read."""
    a, b = read_tokens(path_a), read_tokens(path_b)
    shared = sorted(a.keys() & b.keys(), key=lambda key: (key[1], key[0]))
    differences = []
    for session, turn in shared:
        position = _first_difference(a[session, turn].token_ids, b[session, turn].token_ids)
        if position is not None:
            margins = [side[session, turn].margins[position : position + 1] for side in (a, b)]
            known = [float(m[0]) for m in margins if len(m) and not isnan(m[0])]
            differences.append(Difference(session, turn, position, min(known) if known else None))
    by_session: dict[str, Difference] = {}
    for difference in differences:
        by_session.setdefault(difference.session, difference)
    return TokenComparison(
        turns_compared=len(shared),
        turns_differing=len(differences),
        first=differences[0] if differences else None,
        # An unknown margin is worse than any known one: nothing says that it was a tie.
        worst=max(by_session.values(), key=lambda d: float("inf") if d.margin is None else d.margin, default=None),
    )


def _first_difference(a: NDArray[np.int32], b: NDArray[np.int32]) -> int | None:
    shorter = min(len(a), len(b))
    unequal = np.flatnonzero(a[:shorter] != b[:shorter])
    if len(unequal):
        return int(unequal[0])
    return shorter if len(a) != len(b) else None


def _table(turns: list[TurnRecord]) -> Any:
    import pyarrow as pa

    counts = [len(turn.token_ids) for turn in turns]
    return pa.table(
        {
            "session": pa.array([t.session for t in turns]).take(pa.array(np.repeat(np.arange(len(turns)), counts))),
            "turn": np.repeat(np.array([t.turn for t in turns], np.int32), counts),
            "position": np.concatenate([np.arange(count, dtype=np.int32) for count in counts]),
            "token_id": np.concatenate([np.asarray(t.token_ids, np.int32) for t in turns]),
            "margin": _nullable([np.asarray(t.margins, np.float64) for t in turns], counts, pa.float32()),
            "emitted_s": _nullable([np.asarray(t.emitted_s, np.float64) for t in turns], counts, pa.float64()),
        }
    )


def _nullable(parts: list[NDArray[np.float64]], counts: list[int], kind: Any) -> Any:
    """One value a token; an engine that tells none (or too few) leaves nulls."""
    import pyarrow as pa

    whole = np.full(sum(counts), np.nan)
    at = 0
    for part, count in zip(parts, counts, strict=True):
        told = min(len(part), count)
        whole[at : at + told] = part[:told]
        at += count
    return pa.array(whole, mask=np.isnan(whole)).cast(kind)


def _cannot_write(path: Path, error: OSError) -> ResultsError:
    return ResultsError(
        f"The tokens cannot be written to {path} ({error.strerror or error}); "
        "free some disk space or set PENSIEVE_OUTPUTS to another folder."
    )
