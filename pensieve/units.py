"""Sizes as people write them ("4GiB", "2 GB", "8192 tokens"), numbers as tables and figures show them, and tables."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pensieve.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table as RichTable

GIB = 2**30
_TOKENS = {"token": 1, "tokens": 1, "tok": 1, "ktokens": 1000, "mtokens": 1_000_000}
_MOST_BARE = 1000
_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*$")


def ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


@dataclass(frozen=True, slots=True)
class Capacity:
    """A cache size given either in bytes or in tokens; exactly one of the two is set."""

    bytes: int | None = None
    tokens: int | None = None

    def in_tokens(self, kv_bytes_per_token: int) -> int:
        if self.tokens is not None:
            return self.tokens
        assert self.bytes is not None
        return self.bytes // kv_bytes_per_token


def parse_capacity(text: str | float, field: str = "size") -> Capacity:
    """Read "4GiB", "2GB", "8192 tokens", or a number alone: 2 is 2 GB.

    Raises ConfigError for a number alone of 1000 or more, which is more likely meant in tokens or MB.
    """
    from pydantic import ByteSize

    match = _SIZE.match(str(text))
    if match is None:
        raise ConfigError(f'{field}={text!r} is not a size; write "4GiB", "2GB" or "8192 tokens".')
    number, unit = float(match[1]), match[2].lower()
    if unit.endswith("b") and unit in ByteSize.byte_sizes:
        return Capacity(bytes=int(number * ByteSize.byte_sizes[unit]))
    if unit in _TOKENS:
        return Capacity(tokens=int(number * _TOKENS[unit]))
    if unit == "" and number == 0:
        return Capacity(tokens=0)
    if unit == "" and number < _MOST_BARE:
        return Capacity(bytes=int(number * 10**9))
    unknown = "no unit" if unit == "" else "no known unit"
    raise ConfigError(f'{field}={text!r} has {unknown}; write "4GiB", "2GB" or "8192 tokens" (2 alone is 2 GB).')


def format_bytes(count: float) -> str:
    """Binary units with one decimal: 1536 -> "1.5 KiB"."""
    from pydantic import ByteSize

    return ByteSize(count).human_readable(separator=" ")


NONE = "–"
"""In place of a number that is not known."""


def three_digits(value: float | None) -> str:
    """1234 as 1,234 and 12.34 as 12.3, with two decimals below 10."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def significant(value: float) -> str:
    """Three significant digits, and all of those before the point: 1,234, 1.5, 0.00123."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percent(share: float | None) -> str:
    """A share from 0 to 1 in percent, with one decimal and no sign."""
    return NONE if share is None else f"{100 * share:.1f}"


def duration(seconds: float) -> str:
    """As a person says it: "40 s", "12 min", "3 h 20 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


Table = Sequence[Mapping[str, str]]
"""Lines of cells by column, all with the same columns, of which the first names the line."""


def grid(
    table: Table, title: str = "", left: Collection[str] = (), heads: bool = True, fold: bool = False
) -> RichTable:
    """For a terminal, without lines between the cells; texts are markup. left: columns that are not of numbers, beside the
    first. fold: a cell may take several lines."""
    from rich import box
    from rich.table import Table as RichTable

    found = RichTable(
        title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=not fold,
        show_header=heads,
    )  # fmt: skip
    for place, column in enumerate(table[0]):
        found.add_column(column, justify="left" if place == 0 or column in left else "right", no_wrap=not fold)
    for line in table:
        found.add_row(*line.values())
    return found


# Values of swept fields, as texts

NO_VALUE = "None"
"""How a field that is null reads in a trial's configuration."""


def number(value: str) -> float | None:
    """What a swept value comes to: a number as it is, a size ("2 ktokens", "1GiB") in tokens or bytes; None for a name."""
    found = _size(value)
    return found[1] if found else None


def in_order(values: Mapping[str, Any] | Sequence[str]) -> list[str]:
    """Ascending where all that are given are numbers, or all are sizes in one unit, and what is not given (null) last;
    else as given."""
    sizes = {value: _size(value) for value in values}
    known = [size for value, size in sizes.items() if value != NO_VALUE]
    units = {size[0] for size in known if size and size[1]}  # nothing is as much in bytes as it is in tokens
    if any(size is None for size in known) or len(units) > 1:
        return list(sizes)
    return sorted(sizes, key=lambda value: size[1] if (size := sizes[value]) else math.inf)


def _size(value: str) -> tuple[str, float] | None:
    """Its unit ("", "tokens" or "bytes") and how many; None for a name."""
    try:
        plain = float(value)
        return ("", plain) if math.isfinite(plain) else None
    except ValueError:
        pass
    try:
        capacity = parse_capacity(value)
    except ConfigError:
        return None
    return ("tokens", capacity.tokens) if capacity.tokens is not None else ("bytes", capacity.bytes or 0)
