"""Reads the entries of workload files, each by a model of its fields; what is wrong with one is fatal or counted, and never
passed over in silence."""

import csv
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AliasPath, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError

from pensieve.errors import MalformedInput
from pensieve.lab.workload.recording import hashes_of

log = logging.getLogger(__name__)

OnMalformed = Literal["skip", "fail"]
T = TypeVar("T")

EXAMPLES = 5


def seconds(stamp: object) -> float:
    """Since 1970, of a time as ISO 8601 has it; one without a zone is UTC's. Raises ValueError."""
    found = datetime.fromisoformat(str(stamp).replace(",", "."))
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


Whole = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Said = Annotated[str, Field(min_length=1)]
Time = Annotated[float, BeforeValidator(seconds)]
Hashes = Annotated[Any, PlainValidator(hashes_of)]


class Entry(BaseModel):
    """What a format has in an entry, by the names of the file; what else there is does not matter. Numbers may be written as
    text, as CSV has them."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, populate_by_name=True, coerce_numbers_to_str=True)

    @classmethod
    def needs(cls) -> set[str]:
        """The fields without which an entry is of another format."""
        paths = {name: each.validation_alias or name for name, each in cls.model_fields.items() if each.is_required()}
        return {str(one.path[0]) if isinstance(one, AliasPath) else str(one) for one in paths.values()}


class Reader:
    """Reads the entries of one recording, which may lie in several files.

    An entry that cannot be used raises MalformedInput with file, line and reason (on_malformed="fail"), or is counted and
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
        try:
            _, first = next(self._rows(self.files("*.json*")[0]), ("", None))
        except MalformedInput:
            return set()
        return set(first) if isinstance(first, Mapping) else set()

    def entries(self, parse: Callable[[Any], T], file: Path | None = None) -> Iterator[T]:
        """parse(entry) of each entry of a file: a JSON list, a JSON object a line, one JSON object, or CSV."""
        return self.parsed(self._rows(file or self.path), parse)

    def parsed(self, rows: Iterator[tuple[str, Any]], parse: Callable[[Any], T]) -> Iterator[T]:
        """parse(row) of those that are not malformed. rows: where each is, and it."""
        for where, row in rows:
            try:
                parsed = parse(row)
            except ValueError as error:
                self.reject(where, _reason(error))
            else:
                yield parsed

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

    def _rows(self, file: Path) -> Iterator[tuple[str, Any]]:
        first = next((line for line in self._lines(file) if line.strip()), "")
        if first.lstrip()[:1] not in ("[", "{"):
            rows = csv.DictReader(self._lines(file))
            yield from ((f"{file}:{rows.line_num}", row) for row in rows)
        elif first.lstrip()[0] == "[" or not _is_whole(first):
            try:
                listed = json.loads("".join(self._lines(file)))
            except ValueError as error:
                raise MalformedInput(f"{file} cannot be read as JSON: {error}.") from error
            for number, entry in enumerate(listed if isinstance(listed, list) else [listed], start=1):
                yield f"{file}: entry {number}", entry
        else:
            for number, line in enumerate(self._lines(file), start=1):
                if not line.strip():
                    continue
                try:
                    entry = json.loads(line)
                except ValueError as error:
                    self.reject(f"{file}:{number}", f"it is no JSON ({error})")
                else:
                    yield f"{file}:{number}", entry

    def _lines(self, file: Path) -> Iterator[str]:
        try:
            with file.open(encoding="utf-8-sig", errors="replace", newline="") as lines:
                yield from lines
        except OSError as error:
            raise MalformedInput(f"{file} cannot be read ({error.strerror}); set workload.path to a file.") from error


def _is_whole(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _reason(error: ValueError) -> str:
    """Without the value, which may be as long as a prompt."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}".removeprefix(": ").replace("Value error, ", "")
