"""Reads the lines of workload files; what is wrong with a line is fatal or counted, and never passed over in silence."""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from pensieve.errors import MalformedInput
from pensieve.lab.workload.recording import Recording

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
        line = next((line for line in self._lines(file) if line.strip()), "")
        if line.lstrip()[:1] not in ("[", "{"):
            return set(next(csv.reader([line]), ()))
        for text in (line, file.read_bytes()):  # an entry a line, or one document over many
            try:
                entry = json.loads(text)
            except ValueError:
                continue
            if isinstance(entry, list):
                entry = entry[0] if entry else None
            return set(entry) if isinstance(entry, Mapping) else set()
        return set()

    def entries(self, parse: Callable[[Row], T], file: Path | None = None) -> Iterator[T]:
        """parse(entry) of each entry of a file that holds one JSON list, or one JSON object a line."""
        file = file or self.path
        if next((line.lstrip()[0] == "[" for line in self._lines(file) if line.strip()), False):
            try:
                listed = json.loads(file.read_text(encoding="utf-8"))
            except (ValueError, OSError) as error:
                raise MalformedInput(f"{file} cannot be read as JSON: {error}.") from error
            for number, entry in enumerate(listed, start=1):
                yield from self.parsed(f"{file}: entry {number}", entry, parse)
            return
        for number, line in enumerate(self._lines(file), start=1):
            if line.strip():
                yield from self._loaded(f"{file}:{number}", line, parse)

    def documents(self, pattern: str, parse: Callable[[Row], T]) -> Iterator[T]:
        """parse(document) of each file that holds one JSON object; the path is such a file, or a folder of them."""
        for file in self.files(pattern):
            yield from self._loaded(str(file), "".join(self._lines(file)), parse)

    def csv_rows(self, columns: tuple[str, ...], parse: Callable[[Row], T]) -> Iterator[T]:
        """parse(row) of each row below the header, which must hold `columns`."""
        rows = csv.DictReader(self._lines(self.path))
        lacking = [name for name in columns if name not in (rows.fieldnames or ())]
        if lacking:
            raise MalformedInput(
                f"{self.path}:1: the header lacks {', '.join(lacking)}; choose another workload.format for this file."
            )
        for row in rows:
            where = f"{self.path}:{rows.line_num}"
            if None in row or None in row.values():
                self.reject(where, "it has not as many cells as the header")
            else:
                yield from self.parsed(where, row, parse)

    def read(self, format: str, read: Callable[[Reader], Recording]) -> Recording:
        """What a format makes of this file, and how much was left out of it."""
        found = read(self)
        return replace(found, format=format, malformed=self.malformed, examples=tuple(self.examples))

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

    def _loaded(self, where: str, text: str, parse: Callable[[Row], T]) -> Iterator[T]:
        try:
            row = json.loads(text)
        except ValueError as error:
            self.reject(where, f"it is no JSON ({error})")
        else:
            yield from self.parsed(where, row, parse)

    def parsed(self, where: str, row: Any, parse: Callable[[Row], T]) -> Iterator[T]:
        """parse(row), or nothing where it is malformed."""
        try:
            if not isinstance(row, Mapping):
                raise Malformed("it is no JSON object")
            parsed = parse(row)
        except Malformed as error:
            self.reject(where, str(error))
        else:
            yield parsed

    def _lines(self, file: Path) -> Iterator[str]:
        try:
            with file.open(encoding="utf-8-sig", errors="replace", newline="") as lines:
                yield from lines
        except OSError as error:
            raise MalformedInput(f"{file} cannot be read ({error.strerror}); set workload.path to a file.") from error


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
