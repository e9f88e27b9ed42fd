"""A map of cache sizes: what the trials of its cells say, the smallest sizes that suffice, and what that is in a sentence.

A map is a sweep over cache.gpu, cache.cpu and, where several are asked, cache.disk, in which not every cell has run. A cell
is named by its place, the indices of its sizes; `commands.size` runs the cells and this reads them, so that the command, the
table and the figure agree.

Two questions are asked of a cell. Whether it *reaches* the share `knee` of what the largest sizes of the map find, paired
by seed; the smallest cells that do are the knee. Whether it *meets* the objective: the mean over its seeds of a percentile
of the time to first token. A cell is smallest where no other that answers yes has less of one tier and no more of the
other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from statistics import fmean
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from pensieve.errors import MissingSeries, typed
from pensieve.lab import metric_registry
from pensieve.lab.metric_registry import Metric
from pensieve.lab.results.notes import load_line, plan_of
from pensieve.lab.results.prices import Prices
from pensieve.lab.results.schema import Sweep
from pensieve.lab.results.store import JobResult, ResultsStore
from pensieve.lab.statistics import FEWEST_GROUPS, Estimate, estimate_mean, has_interval
from pensieve.lab.workload.base import byte_notes

Place = tuple[int, ...]
"""Indices of a cell's GPU size and CPU size, and of its disk where the map has several, from the smallest on."""

NO_DISK = ""
"""The size of a disk tier that is not there."""

SETTINGS = "size"
"""The key under which a sweep's overrides hold the question that its map answers."""

SHOWN = ("found", "ttft_ms_p50", "ttft_ms_p90", "throughput_output_tok_s", "recomputed_s", "bound")
"""What is told of a cell. found: the share of tokens whose KV was found; bound: the most of it that could be."""

_OF_RATES = {"found": "prompt_hit_rate", "bound": "bound_prompt_hit_rate"}


def metric_of(name: str) -> Metric:
    """What one of SHOWN is: its direction says whether more memory raises or lowers it, where it does anything."""
    return metric_registry.metric_of(_OF_RATES.get(name, name))


class Question(BaseModel):
    """gpu, cpu: sizes a device, ascending, as typed into cache.gpu and cache.cpu. disk: sizes of the machine's disk tier, as
    typed into cache.disk, NO_DISK for none; one is behind every cell, several are the map's third axis. of: history: the
    share of history tokens that had KV; prompt: of all prompt tokens, what others said included. slo_ttft_ms: the objective
    of that percentile; None: not asked."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpu: tuple[str, ...]
    cpu: tuple[str, ...]
    seeds: tuple[int, ...]
    of: Literal["history", "prompt"] = "history"
    knee: float = Field(0.99, gt=0.0, le=1.0)
    percentile: Literal["p50", "p90", "p99"] = "p90"
    slo_ttft_ms: float | None = None
    prices: Prices = Prices()
    devices: int = 1
    disk: tuple[str, ...] = (NO_DISK,)
    modes: tuple[tuple[str, ...], ...] = ()  # how copies are made ahead, by GPU and CPU size; (): in all cells alike

    @field_validator("disk", mode="before")
    @classmethod
    def _one_disk(cls, value: object) -> object:
        """Maps from before there were several say which one."""
        return (value,) if isinstance(value, str) else value

    @property
    def kind(self) -> str:
        """What a share found is of."""
        return "the history" if self.of == "history" else "the prompts"

    @property
    def disks(self) -> bool:
        """The map has an axis of disks."""
        return len(self.disk) > 1

    @property
    def planes(self) -> list[Place]:
        """How the places of each disk end: () for all cells where there is one."""
        return [(index,) for index in range(len(self.disk))] if self.disks else [()]

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes along each axis of a place."""
        sizes = len(self.gpu), len(self.cpu), len(self.disk)
        return sizes if self.disks else sizes[:2]

    @property
    def places(self) -> Iterator[Place]:
        """Of all cells."""
        return product(*map(range, self.shape))

    @property
    def corner(self) -> Place:
        """The largest sizes."""
        return tuple(count - 1 for count in self.shape)

    def sizes(self, place: Place) -> tuple[str, str, str]:
        """GPU, CPU and disk, as typed."""
        return self.gpu[place[0]], self.cpu[place[1]], self.disk[place[2] if self.disks else 0]

    def mode(self, place: Place) -> str:
        """Cells of one mode are one map: among them alone more memory is taken not to be worse. With copy_ahead=auto a larger
        CPU tier can be the first that copies as the paper does, and find less than the one before it. A disk reads and writes
        beside everything else, and may be no help: with one is another map than without."""
        ahead = self.modes[place[0]][place[1]] if self.modes else ""
        return ahead if self.sizes(place)[2] == NO_DISK else f"{ahead} beside a disk"

    def job(self, place: Place, seed: int) -> int:
        """The number of the trial of a cell and a seed among the jobs of the sweep."""
        number = 0
        for index, count in zip(place, self.shape, strict=True):
            number = number * count + index
        return number * len(self.seeds) + self.seeds.index(seed)

    def where(self, job: int) -> tuple[Place, int]:
        """The cell and the seed of a job."""
        cell, seed = divmod(job, len(self.seeds))
        place = []
        for count in reversed(self.shape):
            cell, index = divmod(cell, count)
            place.append(index)
        return tuple(reversed(place)), self.seeds[seed]


@dataclass(frozen=True, slots=True)
class Cell:
    """The completed trials of one place, by seed."""

    place: Place
    trials: Mapping[int, JobResult]

    def values(self, name: str) -> dict[int, float]:
        """By seed; trials without a value are left out."""
        found = {seed: job.value(name) for seed, job in self.trials.items()}
        return {seed: value for seed, value in found.items() if value is not None}

    @property
    def one(self) -> JobResult:
        return next(iter(self.trials.values()))

    @property
    def gpu_bytes(self) -> int:
        """KV of all devices together; so are cpu_bytes and disk_bytes."""
        return self._bytes("budget_gpu_tokens")

    @property
    def cpu_bytes(self) -> int:
        return self._bytes("budget_cpu_tokens")

    @property
    def disk_bytes(self) -> int:
        return self._bytes("budget_disk_tokens")

    def _bytes(self, name: str) -> int:
        trial = self.one.trial
        assert trial is not None
        return int(trial.engine.get(name, 0)) * (trial.kv_bytes_per_token or 0)


@dataclass(frozen=True)
class SizeMap:
    """What is known of a map so far. cells: those with a completed trial."""

    question: Question
    cells: Mapping[Place, Cell]
    failed: Mapping[Place, str] = field(default_factory=dict)

    # -- of one cell --------------------------------------------------------------------------------------------------

    def values(self, place: Place, name: str) -> dict[int, float]:
        """One of SHOWN, or any metric of a trial, by seed."""
        cell = self.cells[place]
        rate = "miss_rate" if self.question.of == "history" else "prompt_hit_rate"
        if name == "found":
            missed = self.question.of == "history"
            return {seed: 1.0 - value if missed else value for seed, value in cell.values(rate).items()}
        if name == "bound":
            return cell.values("bound_hit_rate" if self.question.of == "history" else "bound_prompt_hit_rate")
        return cell.values(name)

    def estimate(self, place: Place, name: str) -> Estimate | None:
        """The mean over seeds, with its interval where enough of them have run."""
        values = self.values(place, name)
        by_seed = {str(seed): [value] for seed, value in sorted(values.items())}
        return estimate_mean(by_seed, metric_of(name).support) if values else None

    def mean(self, place: Place, name: str) -> float | None:
        values = self.values(place, name)
        return fmean(values.values()) if values else None

    @property
    def objective(self) -> str:
        return f"ttft_ms_{self.question.percentile}"

    def share(self, place: Place) -> float | None:
        """Of what the largest sizes find, over the seeds that both have; None before they have run."""
        corner = self.question.corner
        if corner not in self.cells or place not in self.cells:
            return None
        own, most = self.values(place, "found"), self.values(corner, "found")
        seeds = own.keys() & most.keys()
        whole = sum(most[seed] for seed in seeds)
        if not seeds:
            return None
        return sum(own[seed] for seed in seeds) / whole if whole else 1.0

    def reaches(self, place: Place) -> bool:
        share = self.share(place)
        return share is not None and share >= self.question.knee

    def meets(self, place: Place) -> bool:
        """False also where no objective was asked."""
        slo, value = self.question.slo_ttft_ms, self.mean(place, self.objective)
        return slo is not None and value is not None and value <= slo

    def surely_meets(self, place: Place) -> bool:
        """The whole interval does; False where too few seeds have run for one."""
        found = self.estimate(place, self.objective) if self.meets(place) else None
        slo = self.question.slo_ttft_ms
        return found is not None and found.ci_high is not None and slo is not None and found.ci_high <= slo

    def an_hour(self, place: Place) -> float | None:
        """What the cell costs in the unit of the prices; None where none is given."""
        cell, prices = self.cells[place], self.question.prices
        if not prices.given:
            return None
        return prices.an_hour(self.question.devices, cell.gpu_bytes, cell.cpu_bytes, cell.disk_bytes)

    # -- of the map ---------------------------------------------------------------------------------------------------

    def smallest(self, suffices: Callable[[Place], bool], beside: Place = ()) -> list[Place]:
        """The cells that suffice, where no other that does has less of one tier and no more of the others, by their places.
        beside: only among those of this plane."""
        front: list[Place] = []
        for place in sorted(self.cells):
            if beside and place[2:] != beside:
                continue
            if suffices(place) and not any(within(other, place) for other in front):
                front.append(place)
        return front

    @cached_property
    def knee(self) -> list[Place]:
        return self.smallest(self.reaches)

    @cached_property
    def meeting(self) -> list[Place]:
        return self.smallest(self.meets)

    def pick(self, front: Sequence[Place]) -> Place | None:
        """Of the smallest cells the cheapest, where prices are given; else the one with least GPU memory, which is what is
        scarce."""
        if not front:
            return None
        return min(front, key=lambda place: (self.an_hour(place) or 0.0, place))

    @property
    def answer(self) -> Place | None:
        """The sizes that the sentence is about: the cheapest that surely meet the objective, else that do on the mean, else
        those of the knee."""
        return self.pick(self.smallest(self.surely_meets)) or self.pick(self.meeting) or self.pick(self.knee)

    @cached_property
    def deciding(self) -> set[Place]:
        """The cells on which the answers depend, whether they have run or not: the largest sizes, the smallest cells that
        suffice, and those just below."""
        found = {self.question.corner}
        for suffices in (self.reaches, self.meets):
            for place in self.smallest(suffices):
                found.add(place)
                for axis, index in enumerate(place):
                    found.add((*place[:axis], index - 1, *place[axis + 1 :]))
        return {place for place in found if min(place) >= 0}

    def interpolated(self, name: str) -> dict[Place, float]:
        """Of the cells that have not run, linear between those of their mode and disk that have, and no better than a larger
        one of these nor worse than a smaller one, where these agree. Cells that lie beyond all of these are left out."""
        q = self.question
        known = {place: value for place in self.cells if (value := self.mean(place, name)) is not None}
        waiting = [place for place in q.places if place not in self.cells]
        found: dict[Place, float] = {}
        falling = metric_of(name).better == "lower"

        def plane(place: Place) -> tuple[str, Place]:
            return q.mode(place), place[2:]

        for one in dict.fromkeys(map(plane, waiting)):
            flat = {place[:2]: value for place, value in known.items() if plane(place) == one}
            linear = _linear(flat, [place[:2] for place in waiting if plane(place) == one])
            found |= {(*at, *one[1]): _between(at, value, flat, falling) for at, value in linear.items()}
        return found

    # -- in words -----------------------------------------------------------------------------------------------------

    @property
    def inferred(self) -> str:
        """What the answer rests on beside trials; "" where every cell has run."""
        every, ran = math.prod(self.question.shape), len(self.cells)
        return "" if ran == every else f"({ran} of {every} cells ran; the others follow if more memory is not worse)"

    def name(self, place: Place) -> str:
        """ "40 GB of GPU and 90 GB of CPU KV"."""
        gpu, cpu, disk = (spaced(size) for size in self.question.sizes(place))
        each = " a device" if self.question.devices > 1 else ""
        beside = f" beside {disk} of disk" if disk else " without a disk" if self.question.disks else ""
        return f"{gpu} of GPU and {cpu} of CPU KV{each}{beside}"

    def load(self) -> str | None:
        """The traffic that the answer is for, and what to install where its tokens are bytes."""
        one = self.cells.get(self.question.corner)
        trials = [job.trial for job in one.trials.values() if job.trial is not None] if one else []
        in_bytes = dict.fromkeys(text for trial in trials for text in byte_notes(plan_of(trial)))
        return "\n".join(filter(None, (load_line(trials), *in_bytes))) or None

    def sentence(self) -> str:
        """The answer. Raises MissingSeries where the largest sizes have not run yet."""
        corner = self.question.corner
        if corner not in self.cells:
            raise MissingSeries("The map's largest sizes have no completed trial yet; run the same command again.")
        slo, knee = self.question.slo_ttft_ms, self.pick(self.knee)
        if slo is None:
            return f"{self._knee(knee)}{_bracketed(self._money(knee))}."
        asked = f"{slo:g} ms at {self.question.percentile}"
        enough = self.pick(self.meeting)
        if enough is None:
            best = min(self.cells, key=lambda place: (self.mean(place, self.objective) or float("inf"), place))
            return (
                f"No size on this map meets {asked}: the best is {self._reached(best)} with {self.name(best)}. More memory "
                "alone does not do it: lower the load, use a faster machine, or raise slo.ttft_ms. "
                f"{self._knee(knee)}."
            )
        sure = self.pick(self.smallest(self.surely_meets))
        place = enough if sure is None else sure
        of_it = f"{self.name(place)}{_bracketed(self._doubt(place), self._money(place))}"
        first = (
            f"Too few seeds to recommend a size for {asked}: add seeds to size.seeds, at least {FEWEST_GROUPS}. Of those "
            f"that ran {of_it} is the smallest whose mean meets it"
            if sure is None
            else f"To meet {asked} you need {of_it}"
        )
        first = f"{first}; {self._more(place)}."
        return first if knee is None or knee == place else f"{first} {self._knee(knee)}."

    def _knee(self, place: Place | None) -> str:
        if place is None:
            return "No conversation comes back, so there is nothing to be found in a cache"
        seeds = len(self.cells[place].trials)
        few = (
            f" (of {seeds} seed{'s' * (seeds > 1)}: no recommendation below {FEWEST_GROUPS})"
            if not has_interval(seeds)
            else ""
        )
        return f"{self.question.knee:.0%} of what {self.name(self.question.corner)} find needs {self.name(place)}{few}"

    def _more(self, place: Place) -> str:
        """What the largest sizes add."""
        corner, share = self.question.corner, self.share(place)
        if place == corner:
            return "those are the largest sizes of the map"
        if share is None:
            return "nothing is to be found in a cache here"
        own, most = self.mean(place, "found"), self.mean(corner, "found")
        assert own is not None and most is not None
        gain = f"{100 * (most - own):.1f} points more"
        return f"{self.name(corner)} would find {gain} of {self.question.kind} ({100 * most:.1f} % against {100 * own:.1f} %)"

    def _money(self, place: Place | None) -> str:
        cost = None if place is None else self.an_hour(place)
        return "" if cost is None else f"{cost:.4g} an hour, the cheapest that does"

    def _reached(self, place: Place) -> str:
        found = self.estimate(place, self.objective)
        return "unknown" if found is None else milliseconds(found.value)

    def _doubt(self, place: Place) -> str:
        """Where the interval of the percentile reaches beyond the objective, or there is none."""
        found = self.estimate(place, self.objective)
        assert found is not None and self.question.slo_ttft_ms is not None
        if found.ci_high is None:
            return f"{milliseconds(found.value)}, {found.groups} seed{'s' * (found.groups > 1)}, no interval"
        if found.ci_high > self.question.slo_ttft_ms:
            return f"{milliseconds(found.value)}, but its 95 % interval ends at {milliseconds(found.ci_high)}"
        return f"{milliseconds(found.value)}, its 95 % interval ends at {milliseconds(found.ci_high)}"

    # -- as rows ------------------------------------------------------------------------------------------------------

    def rows(self) -> Iterator[dict[str, Any]]:
        """A row a cell of the whole map; `run` False: interpolated."""
        q, between = self.question, {name: self.interpolated(name) for name in SHOWN}
        for place in q.places:
            gpu, cpu, disk = q.sizes(place)
            run = place in self.cells
            row: dict[str, Any] = {"cache.gpu": gpu, "cache.cpu": cpu, "cache.disk": disk or "0", "run": run}
            row["seeds"] = len(self.cells[place].trials) if run else 0
            for name in SHOWN:
                found = self.estimate(place, name) if run else None
                row[name] = found.value if found else between[name].get(place)
                row[f"{name}_ci_low"] = found.ci_low if found else None
                row[f"{name}_ci_high"] = found.ci_high if found else None
            row["reaches"] = self.reaches(place) if run else None
            row["meets"] = self.meets(place) if run and q.slo_ttft_ms is not None else None
            row["cost_an_hour"] = self.an_hour(place) if run else None
            trials = self.cells[place].trials.values() if run else ()
            row["trials"] = " ".join(str(job.trial.id) for job in trials if job.trial)
            yield row


def read_map(store: ResultsStore, sweep: Sweep) -> SizeMap:
    """The map of a sweep. Raises MissingSeries where the sweep is no map."""
    asked = sweep.overrides.get(SETTINGS)
    if asked is None:
        raise MissingSeries(f"Sweep {sweep.id} is no map of sizes; run `{typed('size')}`.")
    question = Question.model_validate_json(asked)
    trials: dict[Place, dict[int, JobResult]] = {}
    failed: dict[Place, str] = {}
    for job in store.trials_of_sweep(sweep.id):
        place, seed = question.where(job.job)
        if job.trial is not None:
            trials.setdefault(place, {})[seed] = job
        if job.last.status == "failed":
            failed[place] = str(job.last.error)
    return SizeMap(question, {place: Cell(place, found) for place, found in sorted(trials.items())}, failed)


def _linear(known: Mapping[Place, float], wanted: Sequence[Place]) -> dict[Place, float]:
    """Those of `wanted` that lie between known ones."""
    for along, across in ((0, 1), (1, 0)):
        if len({place[across] for place in known}) == 1:
            import numpy as np

            line = sorted((place[along], value) for place, value in known.items())
            on_it = [place for place in wanted if place[across] == next(iter(known))[across]]
            ats, values = zip(*line, strict=True)
            found = np.interp([place[along] for place in on_it], ats, values, left=np.nan, right=np.nan)
            return _told(on_it, found)
    if len(known) < 3:
        return {}
    from scipy.interpolate import LinearNDInterpolator
    from scipy.spatial import QhullError

    try:
        return _told(wanted, LinearNDInterpolator(list(known), list(known.values()))(wanted))
    except QhullError:  # all on one line, askew
        return {}


def _told(places: Sequence[Place], values: Iterable[float]) -> dict[Place, float]:
    """Without those that are not a number."""
    return {place: float(value) for place, value in zip(places, values, strict=True) if value == value}


def within(smaller: Place, larger: Place) -> bool:
    """No tier of it is larger."""
    return smaller[0] <= larger[0] and smaller[1] <= larger[1] and smaller[2:] <= larger[2:]


def _between(place: Place, value: float, known: Mapping[Place, float], falling: bool) -> float:
    """The value, at least that of the smaller cells and at most that of the larger ones, or the other way round."""
    smaller = [found for other, found in known.items() if within(other, place)]
    larger = [found for other, found in known.items() if within(place, other)]
    least, most = (larger, smaller) if falling else (smaller, larger)
    low, high = max(least, default=value), min(most, default=value)
    return min(max(value, low), high) if low <= high else value


def is_map(sweep: Sweep) -> bool:
    return SETTINGS in sweep.overrides


def _bracketed(*texts: str) -> str:
    told = [text for text in texts if text]
    return f" ({'; '.join(told)})" if told else ""


def milliseconds(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 10 else f"{value:.3g} ms"


def spaced(size: str) -> str:
    """ "40GB" as "40 GB"."""
    return re.sub(r"(?<=[0-9])\s*(?=[a-zA-Z])", " ", size)
