"""A map of cache sizes: what the trials of its cells say, the smallest sizes that suffice, and what that is in a sentence.

A map is a panel whose cells lie along cache.gpu and cache.cpu. A cell is named by its place, the indices of its
sizes; `commands.size` runs the cells and this reads them, so that the command, the table and the figure agree.

Two questions are asked of a cell. Whether it *reaches* the share `knee` of what the largest sizes of the map find, paired
by seed; the smallest cells that do are the knee. Whether it *meets* the objective: the mean over its seeds of a percentile
of the time to first token. A cell is smallest where no other that answers yes has less of one tier and no more of the
other.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from statistics import fmean
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pensieve.errors import MissingSeries, typed
from pensieve.lab import metrics
from pensieve.lab.metrics import Metric
from pensieve.lab.results.frame import Cell, Frame
from pensieve.lab.results.notes import load_line, plan_of
from pensieve.lab.results.schema import Sweep, Trial
from pensieve.lab.results.store import ResultsStore
from pensieve.lab.statistics import FEWEST_GROUPS, Estimate, estimate_mean, flat, has_interval
from pensieve.lab.workload.base import byte_notes
from pensieve.serve.books.holding import TIERS
from pensieve.units import GIB, percent, significant

Place = tuple[int, int]
"""Indices of a cell's sizes of GPU and CPU, from the smallest on."""

SETTINGS = "size"
"""The key under which a sweep's overrides hold the question that its map answers."""

SHOWN = ("found", "ttft_ms_p50", "ttft_ms_p90", "throughput_output_tok_s", "recomputed_s", "bound")
"""What is told of a cell. found: the share of history tokens whose KV was found; bound: the most of it that could be."""

_RATES = {"found": "miss_rate", "bound": "bound_hit_rate"}

_SAID = {
    "met": "To meet {objective} you need {size}.",
    "met on the mean": "Too few seeds to recommend a size for {objective}: add seeds to size.seeds, at least {fewest}. Of "
    "those that ran {size} is the smallest whose mean meets it.",
    "not met": "No size on this map meets {objective}: the best is {size}. More memory alone does not do it: lower the load, "
    "use a faster machine, or raise slo.ttft_ms.",
    "knee": "{knee} of what {largest} find needs {size}.",
    "nothing": "No conversation comes back, so there is nothing to be found in a cache.",
}


ONE_PASS = (
    "One pass over the requests in their order, in an open loop: they take no time, and LRU tiers find what their exact "
    "reuse distances say."
)


def metric_of(name: str) -> Metric:
    """What one of SHOWN is: its direction says whether more memory raises or lowers it, where it does anything."""
    return metrics.metric_of({"found": "gpu_hit_rate", "bound": "bound_hit_rate"}.get(name, name))


class Prices(BaseModel):
    """Of an hour: of one device, and of one GiB of KV in each tier; None: not given."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpu_hour: float | None = Field(None, ge=0.0)
    gpu_gib_hour: float | None = Field(None, ge=0.0)
    cpu_gib_hour: float | None = Field(None, ge=0.0)
    disk_gib_hour: float | None = Field(None, ge=0.0)

    @property
    def given(self) -> bool:
        return any(value is not None for value in self.model_dump().values())

    def an_hour(self, devices: int, *tier_bytes: int) -> float:
        """tier_bytes: of all devices, by TIERS. What is not priced costs nothing."""
        gib_hours = (self.gpu_gib_hour, self.cpu_gib_hour, self.disk_gib_hour)
        memory = sum((price or 0.0) * count / GIB for price, count in zip(gib_hours, tier_bytes, strict=True))
        return (self.gpu_hour or 0.0) * devices + memory


class Question(BaseModel):
    """gpu, cpu: sizes a device, ascending, as typed into cache.gpu and cache.cpu. slo_ttft_ms: the objective of that
    percentile; None: not asked."""

    model_config = ConfigDict(frozen=True)

    gpu: tuple[str, ...]
    cpu: tuple[str, ...]
    seeds: tuple[int, ...]
    knee: float = Field(0.99, gt=0.0, le=1.0)
    percentile: Literal["p50", "p90", "p99"] = "p90"
    slo_ttft_ms: float | None = None
    prices: Prices = Prices()
    devices: int = 1
    reuse: tuple[tuple[tuple[float, ...], ...], ...] = ()
    """By seed, GPU and CPU size, what one pass over the requests says that LRU tiers find (lab/reuse.py): a map without
    trials. Empty: each cell is a trial."""

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        """What varies, by its field of the configuration."""
        return {"cache.gpu": self.gpu, "cache.cpu": self.cpu}

    @property
    def places(self) -> list[Place]:
        """Of all cells."""
        return list(product(range(len(self.gpu)), range(len(self.cpu))))

    @property
    def jobs(self) -> list[tuple[Place, int]]:
        """The cell and the seed of each job of the sweep."""
        return list(product(self.places, self.seeds))

    @property
    def corner(self) -> Place:
        """The largest sizes."""
        return len(self.gpu) - 1, len(self.cpu) - 1

    def sizes(self, place: Place) -> tuple[str, str]:
        """GPU and CPU, as typed."""
        gpu, cpu = place
        return self.gpu[gpu], self.cpu[cpu]


@dataclass(frozen=True)
class SizeMap:
    """What is known of a map so far. cells: those with a completed trial; of a map in one pass all, without one."""

    question: Question
    frame: Frame
    cells: Mapping[Place, Cell]

    # -- of one cell --------------------------------------------------------------------------------------------------

    def values(self, place: Place, name: str) -> dict[int, float]:
        """One of SHOWN, or any metric of a trial, by seed; trials without a value are left out."""
        if self.question.reuse:
            gpu, cpu = place
            shares = zip(self.question.seeds, self.question.reuse, strict=True)
            return {seed: share[gpu][cpu] for seed, share in shares} if name == "found" else {}
        rate = _RATES.get(name, name)
        known = {seed: value for (seed, _), value in self.frame.metrics(self.cells[place], rate).items()}
        return {seed: 1.0 - value for seed, value in known.items()} if rate == "miss_rate" else known

    def seeds(self, place: Place) -> list[int]:
        """With which the cell has run, or was computed."""
        if self.question.reuse:
            return list(self.question.seeds)
        return [trial.seed for trial in self.cells.get(place, ())]

    def estimate(self, place: Place, name: str) -> Estimate | None:
        """The mean over seeds, with its interval where enough of them have run."""
        values = self.values(place, name)
        by_seed = {str(seed): [value] for seed, value in sorted(values.items())}
        return estimate_mean(*flat(by_seed), metric_of(name).support) if values else None

    def mean(self, place: Place, name: str) -> float | None:
        values = self.values(place, name)
        return fmean(values.values()) if values else None

    @property
    def objective(self) -> str:
        return f"ttft_ms_{self.question.percentile}"

    def share(self, place: Place) -> float | None:
        """Of what the largest sizes find, over the seeds that both have; None before they have run."""
        if not {place, self.question.corner} <= self.cells.keys():
            return None
        own, most = self.values(place, "found"), self.values(self.question.corner, "found")
        seeds = own.keys() & most.keys()
        whole = sum(most[seed] for seed in seeds)
        return sum(own[seed] for seed in seeds) / whole if whole else 1.0 if seeds else None

    def reaches(self, place: Place) -> bool:
        share = self.share(place)
        return share is not None and share >= self.question.knee

    def meets(self, place: Place) -> bool:
        """False also where no objective was asked."""
        slo, value = self.question.slo_ttft_ms, self.mean(place, self.objective)
        return slo is not None and value is not None and value <= slo

    def surely_meets(self, place: Place) -> bool:
        """The whole interval does; False where too few seeds have run for one."""
        found, slo = self.estimate(place, self.objective), self.question.slo_ttft_ms
        return bool(found and found.ci_high is not None and slo is not None and found.ci_high <= slo)

    def trial(self, place: Place) -> Trial:
        """Of its first seed."""
        return self.cells[place].trials[0]

    def an_hour(self, place: Place) -> float | None:
        """What the cell costs in the unit of the prices, all devices together; None where none is given."""
        if not self.question.prices.given:
            return None
        trial = self.trial(place)
        tokens = (int(trial.engine.get(f"budget_{tier}_tokens", 0)) for tier in TIERS)
        return self.question.prices.an_hour(
            self.question.devices, *(count * (trial.kv_bytes_per_token or 0) for count in tokens)
        )

    # -- of the map ---------------------------------------------------------------------------------------------------

    def smallest(self, suffices: Callable[[Place], bool]) -> list[Place]:
        """The cells that suffice, where no other that does has less of one tier and no more of the other, by their places."""
        front: list[Place] = []
        for gpu, cpu in sorted(self.cells):
            if suffices((gpu, cpu)) and (not front or cpu < front[-1][1]):
                front.append((gpu, cpu))
        return front

    def pick(self, front: Sequence[Place]) -> Place | None:
        """Of the smallest cells the cheapest, where prices are given; else the one with least GPU memory, which is what is
        scarce."""
        if not front:
            return None
        return min(front, key=lambda place: (self.an_hour(place) or 0.0, place))

    @cached_property
    def deciding(self) -> set[Place]:
        """The cells on which the answers depend, whether they have run or not: the largest sizes, the smallest cells that
        suffice, and those just below."""
        found = {self.question.corner}
        for suffices in (self.reaches, self.meets):
            for gpu, cpu in self.smallest(suffices):
                found |= {(gpu, cpu), (gpu - 1, cpu), (gpu, cpu - 1)}
        return {place for place in found if min(place) >= 0}

    # -- in words -----------------------------------------------------------------------------------------------------

    def name(self, place: Place) -> str:
        """ "40 GB of GPU and 90 GB of CPU KV"."""
        gpu, cpu = map(spaced, self.question.sizes(place))
        return f"{gpu} of GPU and {cpu} of CPU KV{' a device' if self.question.devices > 1 else ''}"

    def load(self) -> str | None:
        """The traffic that the answer is for, and what to install where its tokens are bytes; or how a map without trials was
        made."""
        if self.question.reuse:
            return ONE_PASS
        trials = list(self.cells.get(self.question.corner, ()))
        in_bytes = dict.fromkeys(text for trial in trials for text in byte_notes(plan_of(trial)))
        return "\n".join(filter(None, (load_line(trials), *in_bytes))) or None

    def sentence(self) -> str:
        """The answer. Raises MissingSeries where the largest sizes have not run yet."""
        q = self.question
        if q.corner not in self.cells:
            raise MissingSeries(f"The map's largest sizes have no completed trial yet; run `{typed('size')}` again.")
        told: dict[str, Place | None] = {}
        sure, enough, knee = (
            self.pick(self.smallest(suffices)) for suffices in (self.surely_meets, self.meets, self.reaches)
        )
        if q.slo_ttft_ms is not None:
            best = min(self.cells, key=lambda place: (self.mean(place, self.objective) or math.inf, place))
            told["met" if sure else "met on the mean" if enough else "not met"] = sure or enough or best
        if knee is None or knee != (sure or enough):
            told["nothing" if knee is None else "knee"] = knee
        return " ".join(
            _SAID[code].format(
                objective=f"{q.slo_ttft_ms:g} ms at {q.percentile}" if q.slo_ttft_ms is not None else "",
                fewest=FEWEST_GROUPS,
                knee=f"{q.knee:.0%}",
                largest=self.name(q.corner),
                size="" if place is None else f"{self.name(place)} ({'; '.join(self._told(place))})",
            )
            for code, place in told.items()
        )

    def _told(self, place: Place) -> Iterator[str]:
        """What the sentence says of sizes that it names."""
        q, seeds = self.question, len(self.seeds(place))
        late = self.estimate(place, self.objective)
        if q.slo_ttft_ms is not None and late is not None:
            sure = "" if late.ci_high is None else f", 95 % interval up to {significant(late.ci_high)} ms"
            yield f"TTFT {q.percentile} {significant(late.value)} ms{sure}"
        own, most = (percent(self.mean(at, "found")) for at in (place, q.corner))
        yield f"{own} % of the history found, {most} % with the largest sizes"
        if not has_interval(seeds):
            yield f"{seeds} seed{'s' * (seeds > 1)}, no recommendation below {FEWEST_GROUPS}"
        if (cost := self.an_hour(place)) is not None:
            yield f"{cost:.4g} an hour, the cheapest that does"

    # -- as rows ------------------------------------------------------------------------------------------------------

    def rows(self) -> Iterator[dict[str, Any]]:
        """A row a cell; `run`: whether it has, in a map that is not complete."""
        q = self.question
        for place in q.places:
            (gpu, cpu), ran, cell = q.sizes(place), place in self.cells, self.cells.get(place)
            row: dict[str, Any] = {"cache.gpu": gpu, "cache.cpu": cpu, "run": ran}
            row["seeds"] = len(self.seeds(place))
            for name in SHOWN:
                found = self.estimate(place, name) if ran else None
                row[name] = found and found.value
                row[f"{name}_ci_low"] = found and found.ci_low
                row[f"{name}_ci_high"] = found and found.ci_high
            row["reaches"] = self.reaches(place) if ran else None
            row["meets"] = self.meets(place) if ran and q.slo_ttft_ms is not None else None
            row["cost_an_hour"] = self.an_hour(place) if ran else None
            row["trials"] = cell.ids if cell else ""
            yield row


def read_map(store: ResultsStore, sweep: Sweep) -> SizeMap:
    """The map of a sweep. Raises MissingSeries where the sweep is no map."""
    asked = sweep.overrides.get(SETTINGS)
    if asked is None:
        raise MissingSeries(f"Sweep {sweep.id} is no map of sizes; run `{typed('size')}`.")
    if len(json.loads(asked).get("disk", ())) > 1:
        raise MissingSeries(f"Sweep {sweep.id} is a map over several disks, which an older version made.")
    q, frame = Question.model_validate_json(asked), Frame(store, sweep)
    if q.reuse:
        return SizeMap(q, frame, {place: Cell("", {}, ()) for place in q.places})
    every = [cell for panel in frame.panels(*q.axes) for cell in panel.cells]
    cells = {(q.gpu.index(cell.at["cache.gpu"]), q.cpu.index(cell.at["cache.cpu"])): cell for cell in every}
    return SizeMap(q, frame, dict(sorted(cells.items())))


def spaced(size: str) -> str:
    """ "40GB" as "40 GB"."""
    return re.sub(r"(?<=[0-9])\s*(?=[a-zA-Z])", " ", size)
