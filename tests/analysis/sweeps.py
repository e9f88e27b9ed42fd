"""Made-up sweeps for tests of figures, and what a figure shows of them."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from matplotlib.axis import Tick, XTick
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from analysis import style
from analysis.sweep import Source, open_source
from pensieve.lab.metrics import Measurement, MetricValue, summarise
from pensieve.lab.results.store import ResultsStore
from pensieve.lab.turns import Turns
from pensieve.serve.record import TurnRecord
from tests.results.trials import trial_fields, turn

TurnsOf = Callable[[Mapping[str, str], int], Sequence[TurnRecord]]
MetricsOf = Callable[[Mapping[str, str], int], Mapping[str, float]]


class Drawn:
    """Lines and bars of a figure by their gid, as data, and the caption that is saved beside it."""

    def __init__(self, figure: Figure, caption: str = "") -> None:
        self.figure, self.caption = figure, caption

    @property
    def lines(self) -> dict[str, list[tuple[float, float]]]:
        return {
            str(line.get_gid()): [(float(x), float(y)) for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]
            for axes in self.figure.axes
            for line in axes.get_lines()
            if line.get_gid()
        }

    @property
    def bars(self) -> dict[str, tuple[float, float]]:
        """gid -> where each bar begins, and how long it is."""
        patches = [patch for axes in self.figure.axes for patch in axes.patches if patch.get_gid()]
        return {
            str(patch.get_gid()): (patch.get_x(), patch.get_width())
            for patch in patches if isinstance(patch, Rectangle)
        }  # fmt: skip

    @property
    def texts(self) -> list[str]:
        """Wrapped lines joined."""
        return [" ".join(text.get_text().split()) for text in self.figure.findobj(Text)]

    @property
    def clipped(self) -> list[str]:
        """Texts that reach over the edge of a figure, which is one column wide."""
        assert self.figure.get_figwidth() == pytest.approx(style.WIDTH_IN)
        self.figure.draw_without_rendering()
        page = self.figure.bbox.padded(1.0)
        found = []
        for text in set(self.figure.findobj(Text)) - _unseen(self.figure):
            box = text.get_window_extent()
            inside = page.contains(box.x0, box.y0) and page.contains(box.x1, box.y1)
            if text.get_visible() and text.get_text().strip() and not inside:
                found.append(text.get_text())
        return found


def flat(points: Sequence[tuple[float, float]]) -> list[float]:
    """x, y, x, y, ...: what pytest.approx compares."""
    return [value for point in points for value in point]


def answered(
    session: str,
    number: int,
    ttft_ms: float,
    *,
    new: int = 10,
    history: int = 0,
    gpu: int = 0,
    cpu: int = 0,
    tokens: int = 4,
    **columns: Any,
) -> TurnRecord:
    """A completed turn whose history was found as `gpu` and `cpu` say, the rest recomputed."""
    given = {"queue_ms": 0.0, "finished_s": 1.0, **columns}
    return turn(
        session, number, ttft_ms, tokens=range(tokens), prompt_tokens=history + new, new_tokens=new,
        history_tokens=history, gpu_hit_tokens=gpu, cpu_hit_tokens=cpu,
        recomputed_tokens=history - gpu - cpu - columns.get("disk_hit_tokens", 0), **given,
    )  # fmt: skip


def fill(
    store: ResultsStore,
    axes: Mapping[str, Sequence[str]],
    turns_of: TurnsOf,
    metrics_of: MetricsOf = lambda at, seed: {},
    *,
    seeds: Sequence[int] = (0, 1),
    summary: bool = False,
    command: str = "run.py -m",
    slo: Mapping[str, str] | None = None,
    **columns: Any,
) -> Source:
    """A sweep over seeds and `axes` ("baseline" among them), a trial a combination.

    turns_of, metrics_of: what a trial at these values and seed came to. summary: its metrics are those that its turns
    give, in a window that holds all of them. columns: of every trial.
    """
    swept = {name: ",".join(values) for name, values in axes.items()}
    overrides = {"seed": ",".join(map(str, seeds)), **swept, **(slo or {})}
    combinations = list(itertools.product(seeds, *axes.values()))
    sweep = store.open_sweep(f"key {command}", "sweep", None, command, overrides, len(combinations), "host", None)
    for job, (seed, *values) in enumerate(combinations):
        at = dict(zip(axes, values, strict=True))
        turns = list(turns_of(at, seed))
        trial = store.begin_trial(_fields(at, seed, columns))
        store.link(sweep, trial, job, reused=False)
        store.add_turns(trial, turns)
        metrics = summarise(_measured(turns)) if summary else []
        given = metrics_of(at, seed)
        kept = [metric for metric in metrics if metric.name not in given]
        store.add_metrics(trial, [*kept, *(MetricValue(name, value) for name, value in given.items())])
        store.finish_trial(trial, "completed")
    store.set_sweep(sweep, status="completed")
    return open_source(store, sweep)


def _fields(at: Mapping[str, str], seed: int, columns: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {"seed": seed, "workload": {"name": "chat"}, "cache": {"name": "demo"}}
    chosen: dict[str, Any] = {}
    for axis, value in at.items():
        group, *fields = axis.split(".")
        node = config
        for part in (group, *fields[:-1]):
            node = node.setdefault(part, {})
        node[fields[-1] if fields else "name"] = value
        if not fields:
            chosen[group] = value
    base = trial_fields(f"{sorted(at.items())} {seed}", seed=seed)
    engine = {"workload": {"load": "closed", "cache_state": "cold"}}
    return {**base, **chosen, "config": config, "engine": engine, **columns}


def _measured(turns: Sequence[TurnRecord]) -> Measurement:
    ends = [turn.finished_s for turn in turns if turn.finished_s is not None]
    return Measurement(Turns.of(turns), 0.0, max(ends, default=1.0), 0.0, max(ends, default=1.0))


def _unseen(figure: Figure) -> set[Text]:
    """Labels of ticks beyond an axis' limits, which are never shown."""
    found = set()
    for tick in figure.findobj(Tick):
        low, high = sorted(tick.axes.get_xlim() if isinstance(tick, XTick) else tick.axes.get_ylim())
        if not low <= tick.get_loc() <= high:
            found |= {tick.label1, tick.label2}
    return found
