"""Where the history of a cell's turns was found: GPU hit, CPU hit, recomputed, as shares of history tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from analysis.drawing import style
from analysis.drawing.estimates import rate
from analysis.drawing.source import BySession, Cell, Source
from pensieve.statistics import Estimate

PARTS = ("GPU hit", "CPU hit", "recomputed")
COLUMNS = ("session", "history_tokens", "gpu_hit_tokens", "cpu_hit_tokens")


@dataclass(frozen=True, slots=True)
class Shares:
    """gpu, hit (GPU and CPU together) of all history tokens, in percent."""

    gpu: Estimate
    hit: Estimate

    @property
    def parts(self) -> tuple[float, float, float]:
        """As PARTS; they sum to 100."""
        return self.gpu.value, self.hit.value - self.gpu.value, 100.0 - self.hit.value


def shares(source: Source, cell: Cell) -> Shares | None:
    """None where no turn had history, or the engine does not say what it found."""
    gpu: BySession = defaultdict(list)
    hit: BySession = defaultdict(list)
    history: BySession = defaultdict(list)
    for trial in cell.trials:
        for row in source.turns(trial, *COLUMNS):
            if row.history_tokens and row.gpu_hit_tokens is not None:
                key = (trial.seed, f"{row.session}/{trial.repeat}")
                gpu[key].append(100.0 * row.gpu_hit_tokens)
                hit[key].append(100.0 * (row.gpu_hit_tokens + (row.cpu_hit_tokens or 0)))
                history[key].append(float(row.history_tokens))
    return Shares(rate(gpu, history), rate(hit, history)) if history else None


def stack(axes: Axes, places: Sequence[float], found: Sequence[Shares | None], name: str, *, across: bool) -> None:
    """Stacked bars of PARTS at `places`, with the intervals of both boundaries; gids `name/part`. across: lying."""
    known = [(place, one) for place, one in zip(places, found, strict=True) if one is not None]
    starts = [0.0] * len(known)
    for index, part in enumerate(PARTS):
        lengths = [one.parts[index] for _, one in known]
        at = [place for place, _ in known]
        look = {"color": style.PARTS[part], "edgecolor": "#7F7F7F", "linewidth": 0.4}
        if across:
            bars = axes.barh(at, lengths, left=starts, height=0.72, **look)
        else:
            bars = axes.bar(at, lengths, bottom=starts, width=0.72, **look)
        for bar in bars:
            bar.set_gid(f"{name}/{part}")
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    lines = axes.hlines if across else axes.vlines
    for place, one in known:
        for boundary, aside in ((one.gpu, -0.12), (one.hit, 0.12)):
            if boundary is one.gpu and one.gpu.value == one.hit.value:
                continue  # no CPU hits: one boundary
            if boundary.ci_low is not None and boundary.ci_high is not None and boundary.ci_high > boundary.ci_low:
                lines(place + aside, boundary.ci_low, boundary.ci_high, color="black", linewidth=0.8)
