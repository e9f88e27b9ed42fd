"""Reads the lines of workload files; what is wrong with a line is fatal or counted, and never passed over in silence."""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pensieve.errors import MalformedInput
from pensieve.lab.workload.recording import Conversation, Recording

log = logging.getLogger(__name__)

OnMalformed = Literal["skip", "fail"]
Row = Mapping[str, Any]
T = TypeVar("T")

EXAMPLES = 5


class Malformed(ValueError):
    """What is wrong with one line, without where it is."""


class Reader:
    """Reads the rows of one recording, which may lie in several files.

    A row that cannot be used raises MalformedInput with file, line and reason (on_malformed="fail"), or is counted and
    left out, the first few with a warning each ("skip").
    """

    def __init__(self, path: Path, on_malformed: OnMalformed) -> None:
        self.path = path
        self.on_malformed = on_malformed
        self.malformed = 0
        self.examples: list[str] = []

    def files(self, pattern: str) -> list[Path]:
        """The path itself, or where it is a folder the files in it that match. Raises MalformedInput for none."""
        found = sorted(self.path.glob(pattern)) if self.path.is_dir() else [self.path]
        if not found:
            raise MalformedInput(f"The folder {self.path} holds no {pattern}; set workload.path to the recorded files.")
        return found

    def first_fields(self) -> set[str]:
        """The fields of the first entry, or the columns; empty where it has none."""
        file = self.files("*.json*")[0]
        line = next((line for _, line in self._lines(file) if line.strip()), "")
        if line.lstrip()[:1] not in ("[", "{"):
            return set(next(csv.reader([line]), ()))
        try:
            try:
                entry = json.loads(line)
            except ValueError:  # one document over many lines
                entry = json.loads(file.read_bytes())
        except ValueError:
            return set()
        if isinstance(entry, list):
            entry = entry[0] if entry else None
        return set(entry) if isinstance(entry, Mapping) else set()

    def json_lines(self, parse: Callable[[Row], T], file: Path | None = None) -> Iterator[T]:
        """parse(row) of each non-empty line."""
        file = file or self.path
        for number, line in self._lines(file):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                self.reject(f"{file}:{number}", f"it is no JSON ({error})")
                continue
            yield from self._parsed(f"{file}:{number}", row, parse)

    def json_list(self, parse: Callable[[Row], T]) -> Iterator[T]:
        """parse(entry) of each entry of a file that holds one JSON list, or one JSON object a line."""
        if not self._starts_with_bracket():
            yield from self.json_lines(parse)
            return
        try:
            entries = json.loads(self.path.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            raise MalformedInput(f"{self.path} cannot be read as JSON: {error}.") from error
        yield from self.entries(entries, parse)

    def json_documents(self, pattern: str, parse: Callable[[Row], T]) -> Iterator[T]:
        """parse(document) of each file that holds one JSON object; the path is such a file, or a folder of them."""
        for file in self.files(pattern):
            try:
                document = json.loads(file.read_bytes())
            except (ValueError, OSError) as error:
                self.reject(str(file), f"it cannot be read as JSON ({error})")
                continue
            yield from self._parsed(str(file), document, parse)

    def entries(self, entries: Iterable[Any], parse: Callable[[Row], T], name: str | None = None) -> Iterator[T]:
        for number, entry in enumerate(entries, start=1):
            yield from self._parsed(f"{name or self.path}: entry {number}", entry, parse)

    def csv_rows(self, columns: tuple[str, ...], parse: Callable[[Row], T]) -> Iterator[T]:
        """parse(row) of each row below the header, which must hold `columns`."""
        lines = csv.reader(line for _, line in self._lines(self.path))
        header = next(lines, [])
        lacking = [name for name in columns if name not in header]
        if lacking:
            raise MalformedInput(
                f"{self.path}:1: the header lacks {', '.join(lacking)}; choose another workload.format for this file."
            )
        for cells in lines:
            where = f"{self.path}:{lines.line_num}"
            if not cells:
                continue
            if len(cells) != len(header):
                self.reject(where, f"it has {len(cells)} cells, and the header {len(header)}")
                continue
            yield from self._parsed(where, dict(zip(header, cells, strict=True)), parse)

    def recording(
        self,
        format: str,
        conversations: Iterable[Conversation],
        rule: str,
        facts: dict[str, Any] | None = None,
        one_clock: bool = True,
    ) -> Recording:
        """What was read, and how much was left out of it."""
        found = tuple(conversations)
        return Recording(format, found, rule, self.malformed, tuple(self.examples), facts or {}, one_clock)

    def reject(self, where: str, reason: str) -> None:
        sentence = f"{where}: {reason}"
        if self.on_malformed == "fail":
            raise MalformedInput(
                f"{sentence}; correct it, or set workload.on_malformed=skip to leave such lines out and have them counted."
            )
        self.malformed += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append(sentence)
            log.warning("left out %s", sentence)

    def _parsed(self, where: str, row: Any, parse: Callable[[Row], T]) -> Iterator[T]:
        try:
            if not isinstance(row, Mapping):
                raise Malformed("it is no JSON object")
            parsed = parse(row)
        except Malformed as error:
            self.reject(where, str(error))
        else:
            yield parsed

    def _lines(self, file: Path) -> Iterator[tuple[int, str]]:
        try:
            with file.open(encoding="utf-8-sig", errors="replace", newline="") as lines:
                yield from enumerate(lines, start=1)
        except OSError as error:
            raise MalformedInput(f"{file} cannot be read ({error.strerror}); set workload.path to a file.") from error

    def _starts_with_bracket(self) -> bool:
        return next((line.lstrip()[0] == "[" for _, line in self._lines(self.path) if line.strip()), False)


def whole(row: Row, name: str, low: int = 0) -> int:
    """A whole number of at least `low`, also one written as text, as CSV has it. Raises Malformed."""
    value = number(row, name)
    if value != int(value) or value < low:
        raise Malformed(f"{name}={row[name]!r} is not a whole number of at least {low}")
    return int(value)


def number(row: Row, name: str) -> float:
    value = _value(row, name)
    try:
        found = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        found = float("nan")
    if not abs(found) < float("inf"):
        raise Malformed(f"{name}={value!r} is not a number")
    return found


def text(row: Row, name: str) -> str:
    value = _value(row, name)
    if not isinstance(value, str):
        raise Malformed(f"{name} is not a text")
    return value


def hash_list(row: Row, name: str) -> list[int]:
    value = _value(row, name)
    plain = isinstance(value, list) and set(map(type, value)) <= {int}
    if not plain or (value and not (min(value) >= -(2**63) and max(value) < 2**63)):
        raise Malformed(f"{name} is not a list of whole numbers")
    return list(value)


def _value(row: Row, name: str) -> Any:
    if name not in row:
        raise Malformed(f"it has no {name}")
    return row[name]
