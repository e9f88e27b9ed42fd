"""The results of a bench command as a terminal shows them, and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pensieve.errors import ConfigError
from pensieve.lab.bench.case import Measured, Result
from pensieve.lab.results.environment import DISTRIBUTION, environment, gpus
from pensieve.units import NONE, format_bytes

COLUMNS = ("case", "backend", "value", "spread", "unit", "limit", "value / limit", "against best peer", "beside")
WIDTH = 100
_NARROW = ("case", "backend", "value", "spread", "unit", "limit", "of limit", "of peer")


def table(target: str, results: Sequence[Result]) -> RenderableType:
    """A row a backend of a case (see cells), at most WIDTH columns wide; what stands beside the numbers is below them."""
    shown = Table(title=f"bench {target}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in _NARROW:
        left = name in ("case", "backend", "unit")
        shown.add_column(name, justify="left" if left else "right", no_wrap=name not in ("case", "backend"))
    beside = []
    for result in results:
        for number, measured in enumerate(result.measured):
            *row, note = cells(result, measured, first=number == 0)
            shown.add_row(*row, end_section=measured is result.measured[-1])
            if note:
                beside.append(f"{result.case.label}, {measured.backend}: {note}")
    lines = [*beside, *(sentence for result in results for sentence in beyond_the_limit(result))]
    return Group(shown, *(Text(line) for line in lines))


def beyond_the_limit(result: Result) -> list[str]:
    """A sentence for each backend whose value is better than the limit, which then is none."""
    case, found = result.case, []
    for measured in result.measured:
        if not (case.floor and measured.values):
            continue
        ratio = measured.value / case.floor
        if ratio > 1.0 if case.higher_is_better else ratio < 1.0:
            made_of = f" ({case.floor_is})" if case.floor_is else ""
            found.append(
                f"{case.label}: {measured.backend} is at {ratio:.2f} of the limit{made_of}. So it is no limit: its rates "
                "were measured too low in this run, or this backend does less work."
            )
    return found


def cells(result: Result, measured: Measured, first: bool = True) -> tuple[str, ...]:
    """One row: value with its spread, limit, ratio to it, and how many times better than the best peer it is."""
    case = result.case
    name = case.label if first else ""
    backend = measured.backend + (f" {measured.version}" if measured.version else "")
    limit = _number(case.floor)
    if not measured.values:
        return (name, backend, NONE, "", case.unit, limit, NONE, NONE, measured.error or "")
    low, high = measured.interval or (None, None)
    ratio = f"{measured.value / case.floor:.2f}" if case.floor else NONE
    shown = [figure for figure in measured.figures if figure.shown]
    beside = ", ".join(f"{f.name.replace('_', ' ')} {f.remark}{_number(f.value)} {f.unit}".rstrip() for f in shown)
    spread = NONE if low is None else f"{_number(low)}..{_number(high)}"
    against = _against_peers(result, measured)
    return (name, backend, _number(measured.value), spread, case.unit, limit, ratio, against, beside)


def _against_peers(result: Result, measured: Measured) -> str:
    case = result.case
    peers = [m.value for m in result.measured if m.values and m.backend != case.ours]
    if measured.backend != case.ours or not peers:
        return ""
    if case.higher_is_better:
        return f"{measured.value / max(peers):.2f}x"
    return f"{min(peers) / measured.value:.2f}x"


def markdown(
    command: str,
    device: str,
    limits: Mapping[str, Any],
    results: Mapping[str, Sequence[Result]],
    sentences: Sequence[str],
) -> str:
    """The command, what it ran on, and a table a target."""
    found = environment()
    packages = found["packages"]
    lines = [f"`{command}`", "", f"- device: {device}"]
    lines += [
        f"- GPU: {gpu['name']}, {format_bytes(gpu['memory_bytes'] or 0)}, driver {gpu['driver']}, "
        f"SM clock {gpu['sm_mhz']} of {gpu['sm_mhz_max']} MHz, memory clock {gpu['memory_mhz']} MHz"
        for gpu in gpus()  # the clocks of now, not of a device that had nothing to do yet
    ]
    names = ("torch", "transformers", "triton", DISTRIBUTION)
    versions = ", ".join(f"{name} {packages[name]}" for name in names if name in packages)
    lines.append(f"- {versions}, Python {found['python']}, {found['torch_threads']} CPU thread(s)")
    lines.append(f"- commit {found['git']['commit'] or 'unknown'}{' with changes' if found['git']['dirty'] else ''}")
    lines += [f"- {name.replace('_', ' ')} measured in this run: {_rate(value)}" for name, value in limits.items()]
    for target, some in results.items():
        lines += ["", f"**{target}**", "", f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
        for result in some:
            lines += [f"| {' | '.join(cells(result, m))} |" for m in result.measured]
    beyond = [sentence for some in results.values() for result in some for sentence in beyond_the_limit(result)]
    if sentences or beyond:
        lines += ["", *(f"- {sentence}" for sentence in [*beyond, *sentences])]
    return "\n".join(lines) + "\n"


def append(path: Path, text: str) -> None:
    """Append text to the file, after an empty line; make the file if there is none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text(encoding="utf-8").rstrip("\n") + "\n\n" if path.is_file() else ""
        path.write_text(before + text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"bench.markdown={path} cannot be written ({error.strerror}).") from None


def _number(value: float | None) -> str:
    if value is None:
        return NONE
    if value != 0 and (abs(value) < 0.01 or abs(value) >= 1e6):
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _rate(value: Any) -> str:
    return f"{value / 1e9:,.4g} x 10^9 a second" if isinstance(value, float) else str(value)
