"""Time to first token by turn, a line a baseline: python analysis/ttft_by_turn.py [--sweep ID]

Reads the results database and runs nothing. Writes ttft_by_turn.png, .pdf and .csv to outputs/figures; a sweep over more
than seeds and baselines gets one figure for each combination.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT))  # runs from any folder, installed or not

from matplotlib.ticker import MaxNLocator  # noqa: E402

from analysis import style  # noqa: E402
from pensieve.errors import MissingSeries, PensieveError, ResultsError  # noqa: E402
from pensieve.results.schema import Sweep, Trial  # noqa: E402
from pensieve.results.store import ResultsStore, open_store  # noqa: E402
from pensieve.statistics import Estimate, bootstrap_percentile_by_seed  # noqa: E402

NAME = "ttft_by_turn"
COMMAND = "python runners/run.py -m"


@dataclass(frozen=True, slots=True)
class Series:
    """One baseline: the median TTFT in ms of each turn over seeds and conversations, with its 95 % interval."""

    baseline: str
    turns: Mapping[int, Estimate]
    trials: Sequence[Trial]


@dataclass(frozen=True, slots=True)
class Panel:
    """Baselines that differ in nothing else. group: the other swept axes and their values here."""

    group: Mapping[str, str]
    series: Sequence[Series]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", type=int, help="id of the sweep to draw (default: the latest)")
    parser.add_argument("--baselines", help="draw only these, separated by commas (default: all of the sweep)")
    parser.add_argument("--log", action="store_true", help="logarithmic TTFT axis")
    parser.add_argument("--url-env", help="environment variable that holds the URL of another results database")
    options = parser.parse_args(argv)
    outputs = style.outputs_folder()
    try:
        store = open_store(outputs, _url(options.url_env), create=False)
        wanted = [name.strip() for name in options.baselines.split(",")] if options.baselines else None
        sweep, panels = read(store, options.sweep, wanted)
        for panel in panels:
            for path in draw(panel, sweep, outputs / "figures", options.log):
                print(path)
    except PensieveError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{outputs / 'figures'} cannot be written: {error.strerror}; set PENSIEVE_OUTPUTS.", file=sys.stderr)
        return 1
    return 0


def read(store: ResultsStore, sweep_id: int | None, wanted: Sequence[str] | None = None) -> tuple[Sweep, list[Panel]]:
    """The panels of a sweep (None: the latest), from current trials only.

    Raises MissingSeries, with the command to run, where a baseline has no completed trial in some panel, and
    ResultsError where a trial shared its device with others.
    """
    sweep = store.latest_sweep() if sweep_id is None else store.sweep(sweep_id)
    if sweep is None:
        raise MissingSeries(f"There is no sweep in the results database; run `{COMMAND}` first.")
    jobs = store.trials_of_sweep(sweep.id)
    trials = {job.trial.id: job.trial for job in jobs if job.trial is not None}
    again = sweep.command or COMMAND
    swept = [name.strip() for name in str(sweep.overrides.get("baseline", "")).split(",") if name.strip()]
    names = list(wanted or dict.fromkeys([*swept, *(job.last.baseline for job in jobs)]))
    if not names:
        raise MissingSeries(f"Sweep {sweep.id} has no trials yet; run `{again}`.")
    panels = []
    for group, members in _groups(list(trials.values())).items():
        series = []
        for name in names:
            own = [trial for trial in members if trial.baseline == name]
            turns = _by_turn(store, own)
            if not turns:
                command = again if name in swept or not wanted else f"python runners/run.py baseline={name} -m"
                where = f" with {_text(group)}" if group else ""
                raise MissingSeries(
                    f"Sweep {sweep.id} has no completed trial of baseline {name}{where}; run `{command}`."
                )
            series.append(Series(name, turns, own))
        panels.append(Panel(dict(group), series))
    if not panels:
        raise MissingSeries(f"No trial of sweep {sweep.id} is completed; run `{again}`.")
    contended = sorted(trial.id for panel in panels for one in panel.series for trial in one.trials if trial.contended)
    if contended:
        raise ResultsError(
            f"Trials {_ranges(contended)} shared their device with others, so their times mean little; "
            "run them again with trial.exclusive=true."
        )
    return sweep, panels


def draw(panel: Panel, sweep: Sweep, folder: Path, log: bool = False) -> list[Path]:
    """Write the panel as PNG, PDF and CSV; returns the three paths."""
    figure, axes = style.new_figure(height_in=2.75)
    ends = []
    for series in reversed(panel.series):  # the first one lies on top
        numbers = sorted(series.turns)
        estimates = [series.turns[number] for number in numbers]
        medians = [estimate.value for estimate in estimates]
        colour = style.colour(series.baseline)
        low = [one.value if one.ci_low is None else one.ci_low for one in estimates]
        high = [one.value if one.ci_high is None else one.ci_high for one in estimates]
        axes.fill_between(numbers, low, high, color=colour, alpha=0.16, linewidth=0)
        axes.plot(
            numbers, medians, color=colour, marker=style.marker(series.baseline), markersize=3.2, linewidth=1.4,
            label=series.baseline, gid=f"median-{series.baseline}",
        )  # fmt: skip
        ends.append((series.baseline, float(numbers[-1]), medians[-1]))
    if log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("turn of the conversation")
    axes.set_ylabel("time to first token (ms)")
    style.title(figure, "Time to first token by turn", _text(panel.group))
    bottom = style.footer(figure, footnote(panel, sweep))
    room = 0.018 * max(len(series.baseline) for series in panel.series) + 0.04
    top = 0.87 if panel.group else 0.91
    figure.subplots_adjust(left=0.175, right=1 - room, top=top, bottom=bottom + 0.145)
    style.label_ends(axes, ends)
    stem = folder / (NAME + "".join(f"-{_slug(axis)}-{_slug(value)}" for axis, value in panel.group.items()))
    return [*style.save(figure, stem), _write_csv(panel, stem.with_name(stem.name + ".csv"))]


def footnote(panel: Panel, sweep: Sweep) -> str:
    """What a reader must know to trust the lines: what ran where, how often, and what a point is."""
    trials = [trial for series in panel.series for trial in series.trials]
    counts = [estimate.n for series in panel.series for estimate in series.turns.values()]
    n = str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
    seeds = len({trial.seed for trial in trials})
    models = ", ".join(dict.fromkeys(trial.model for trial in trials))
    random = any(trial.weights == "random" for trial in trials)
    weights = "random weights: real speed, meaningless text" if random else "trained weights"
    kinds = {trial.simulated for trial in trials}
    if kinds == {True}:
        weights = "no weights: lengths only"
    how = (
        "SIMULATED by a cost model of"
        if kinds == {True}
        else "measured on"
        if kinds == {False}
        else "PARTLY SIMULATED,"
    )
    device = ", ".join(dict.fromkeys(trial.device or trial.hardware for trial in trials))
    dtype = ", ".join(dict.fromkeys(trial.dtype for trial in trials if trial.dtype))
    failed = sum(1 for trial in trials if "failures" in (trial.flags or {}))
    parts = [
        "Median of completed turns and its 95 % interval",
        f"n = {n} conversations a point, {seeds} seed{'s' if seeds > 1 else ''}",
        f"{models} ({weights})",
        f"{how} {device}{', ' + dtype if dtype else ''}",
        f"sweep {sweep.id}, trials {_ranges(sorted(trial.id for trial in trials))}",
    ]
    if failed:
        parts.append(f"{failed} trials have turns that did not complete")
    return "; ".join(parts) + "."


def _by_turn(store: ResultsStore, trials: Iterable[Trial]) -> dict[int, Estimate]:
    """Measured, completed turns; a repeat of a seed adds conversations to it."""
    values: dict[int, dict[tuple[int, str], float]] = defaultdict(dict)
    for trial in trials:
        for row in store.turns_of(trial.id, "session", "turn", "phase", "status", "ttft_ms"):
            if row.phase != "warmup" and row.status == "completed" and row.ttft_ms is not None:
                values[row.turn][trial.seed, f"{row.session}/{trial.repeat}"] = row.ttft_ms
    return {turn: bootstrap_percentile_by_seed(found, 0.5) for turn, found in sorted(values.items())}


def _groups(trials: Sequence[Trial]) -> dict[tuple[tuple[str, str], ...], list[Trial]]:
    """Trials by the values of every axis, other than seed, repeat and baseline, that the sweep varied."""
    leaves = {trial.id: _leaves(trial.config or {}) for trial in trials}
    alike: dict[tuple[str, int, int], list[dict[str, str]]] = defaultdict(list)
    for trial in trials:
        alike[trial.baseline, trial.seed, trial.repeat].append(leaves[trial.id])
    axes = sorted(
        {
            axis
            for members in alike.values()
            for axis in set().union(*members)
            if len({member.get(axis) for member in members}) > 1
        }
    )
    named = {axis.removesuffix(".name") for axis in axes if axis.endswith(".name")}
    axes = [axis for axis in axes if axis.endswith(".name") or axis.split(".")[0] not in named]
    groups: dict[tuple[tuple[str, str], ...], list[Trial]] = {}
    for trial in sorted(trials, key=lambda trial: trial.id):
        key = tuple((axis.removesuffix(".name"), leaves[trial.id].get(axis, "")) for axis in axes)
        groups.setdefault(key, []).append(trial)
    return groups


def _leaves(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """A nested configuration as dotted names and texts, without what is not an axis."""
    found: dict[str, str] = {}
    for key, value in config.items():
        if not prefix and key in ("seed", "repeat", "baseline", "hydra", "tracking", "trial", "force", "resume"):
            continue
        if isinstance(value, Mapping):
            found |= _leaves(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = str(value)
    return found


def _write_csv(panel: Panel, path: Path) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(
            [*panel.group, "baseline", "turn", "ttft_ms_median", "ci_low", "ci_high", "n", "n_seeds", "trials"]
        )
        for series in panel.series:
            ids = " ".join(str(trial.id) for trial in series.trials)
            for number, one in series.turns.items():
                row = [series.baseline, number, one.value, one.ci_low, one.ci_high, one.n, one.groups, ids]
                writer.writerow([*panel.group.values(), *row])
    return path


def _ranges(ids: Sequence[int]) -> str:
    """1, 2, 3, 7 as "1-3, 7"."""
    runs: list[list[int]] = []
    for one in ids:
        if runs and one == runs[-1][1] + 1:
            runs[-1][1] = one
        else:
            runs.append([one, one])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _text(group: Mapping[str, str] | Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{axis}={value}" for axis, value in dict(group).items())


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "_", text).strip("_")


def _url(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ResultsError(f"The environment variable {variable} is not set; put the database's URL into it.")
    return os.environ[variable]


if __name__ == "__main__":
    sys.exit(main())
