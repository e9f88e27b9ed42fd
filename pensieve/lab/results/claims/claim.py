"""The entries of a file of claims: what is claimed, by whom, under which conditions; and which conditions trials fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from pensieve.errors import ConfigError
from pensieve.lab.results.claims.measures import MEASURES, arguments_of
from pensieve.lab.results.schema import Trial
from pensieve.lab.results.trials import field_of


@dataclass(frozen=True, slots=True)
class Bounds:
    """The values that satisfy a claim: low <= value <= high; an end of None is open.

    claimed: the number itself: the bound of a one-sided claim, the middle of "about x", the lower end of a range.
    shown: as people write it, such as "1.5 to 2.5".
    """

    low: float | None
    high: float | None
    claimed: float
    shown: str

    def __post_init__(self) -> None:
        assert self.low is not None or self.high is not None, "a claim that nothing could contradict"
        assert self.low is None or self.high is None or self.low <= self.high

    def contain(self, value: float) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


class Claimed(BaseModel):
    """One of: above, below (a bound, inclusive), between (two bounds), about (a value, within +/- give_or_take)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    above: float | None = None
    below: float | None = None
    between: tuple[float, float] | None = None
    about: float | None = None
    give_or_take: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _one_kind(self) -> Claimed:
        if sum(value is not None for value in (self.above, self.below, self.between, self.about)) != 1:
            raise ValueError("give one of above, below, between and about")
        if (self.about is None) != (self.give_or_take is None):
            raise ValueError("about needs give_or_take, and nothing else does")
        if self.between is not None and self.between[0] >= self.between[1]:
            raise ValueError("between needs its lower end first")
        return self

    def bounds(self) -> Bounds:
        if self.between is not None:
            low, high = self.between
            return Bounds(low, high, low, f"{_text(low)} to {_text(high)}")
        if self.about is not None and self.give_or_take is not None:
            low, high = self.about - self.give_or_take, self.about + self.give_or_take
            return Bounds(low, high, self.about, f"about {_text(self.about)} (± {_text(self.give_or_take)})")
        if self.above is not None:
            return Bounds(self.above, None, self.above, f"> {_text(self.above)}")
        assert self.below is not None
        return Bounds(None, self.below, self.below, f"< {_text(self.below)}")


Values = tuple[str | float | bool | None, ...]


def _one_or_more(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


Names = Annotated[tuple[str, ...], BeforeValidator(_one_or_more)]


class Claim(BaseModel):
    """One entry: all that a verdict needs beside the trials.

    measure, arguments: one of results.claims.measures. of, against: baselines; the first one that the sweep has
    is taken. over: the swept field that the measure reads along, the first of these that the sweep varies; the sweep's other
    axes make groups, judged one by one.
    conditions: column of table `trial` (or dotted field of its configuration) -> the values that count, patterns such as
    "*A100*" included. seeds: the fewest that decide it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    text: str
    source: str
    measure: str
    arguments: dict[str, Any] = {}
    of: Names
    against: Names = ()
    over: Names = ()
    claimed: Claimed
    unit: str
    conditions: dict[str, Values] = {}
    seeds: int = Field(default=3, ge=1)

    @model_validator(mode="after")
    def _can_be_measured(self) -> Claim:
        if self.measure not in MEASURES:
            raise ValueError(f"there is no measure {self.measure}; there are: {', '.join(sorted(MEASURES))}")
        unknown = sorted(set(self.arguments) - arguments_of(self.measure))
        if unknown:
            raise ValueError(f"the measure {self.measure} takes no {', '.join(unknown)}")
        return self


def read_claims(path: Path) -> Sequence[Claim]:
    """The claims of a YAML file, in its order. Raises ConfigError with one sentence about the first thing wrong."""
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The claims cannot be read from {path} ({error.strerror}); put the file there.") from None
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" at line {where.line + 1}" if where else ""
        raise ConfigError(f"{path} is not YAML{line}; correct it.") from None
    if not isinstance(entries, list):
        raise ConfigError(f"{path} must hold a list of claims.")
    claims: dict[str, Claim] = {}
    for place, entry in enumerate(entries, start=1):
        name = entry.get("name") if isinstance(entry, dict) else None
        try:
            claim = Claim.model_validate(entry)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            what = first["msg"].removeprefix("Value error, ")
            raise ConfigError(
                f"Claim {name or place} of {path.name} cannot be used{f' ({field})' if field else ''}: {what}."
            ) from None
        if claim.name in claims:
            raise ConfigError(f"{path.name} has two claims called {claim.name}; name one of them otherwise.")
        claims[claim.name] = claim
    return list(claims.values())


def unmet(conditions: Mapping[str, Values], trials: Sequence[Trial]) -> list[str]:
    """A clause for each condition that one of the trials does not meet. Fields are columns, or dotted configuration."""
    found = []
    for field, wanted in conditions.items():
        values = [field_of(trial, field) for trial in trials]
        if strange := list(dict.fromkeys(_shown(value) for value in values if not _meets(value, wanted))):
            claimed = " or ".join(_shown(value) for value in wanted)
            found.append(f"{field} is {', '.join(strange)} here, claimed for {claimed}")
    return found


def _meets(value: Any, wanted: Values) -> bool:
    return any(
        fnmatchcase(str(value), one) if isinstance(one, str) else value == one and (value is None) == (one is None)
        for one in wanted
    )


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    return str(value) if isinstance(value, bool) or not isinstance(value, int | float) else _text(value)


def _text(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"
