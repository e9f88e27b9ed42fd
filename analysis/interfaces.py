"""One engine in this process and over HTTP: what the interface adds to a first token."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from analysis import tables
from analysis.alike import panels_of_interfaces
from analysis.estimates import one_each
from analysis.prefix import WORKLOAD, named, steps_of, ttft
from analysis.registry import Plot, columns, figure
from analysis.sweep import Source
from pensieve.statistics import Estimate, bootstrap_percentile_by_seed

INTERFACES = {"llama_cpp": "llama_cpp_http", "vllm": "vllm_http"}
"""Baselines that are the same engine, without HTTP and with it."""


def http_ms(inside: pd.DataFrame, over: pd.DataFrame) -> Estimate:
    """Median over rounds of the time to first token over HTTP minus in this process, the same query compared with itself."""
    ours, theirs = one_each(inside["ttft_ms"]), one_each(over["ttft_ms"])
    return bootstrap_percentile_by_seed({key: theirs[key] - ours[key] for key in ours.keys() & theirs.keys()}, 0.5)


@figure(
    "engine_interfaces",
    "An engine in this process and over HTTP",
    shows="what HTTP adds to the first token of the same engine",
    command="python runners/run.py experiment=prefix_invalidation_engines -m",
    applies=lambda source: (
        source.has_workload(WORKLOAD) and any({*pair} <= {*source.baselines()} for pair in INTERFACES.items())
    ),
)
def engine_interfaces(source: Source) -> Iterator[Plot]:
    lead = (
        "Medians of times to first token over conversations with 95 % intervals; difference: over HTTP minus in this "
        "process, paired by seed and conversation"
    )
    for panel in panels_of_interfaces(source, INTERFACES):
        steps = {cell.baseline: (cell, steps_of(source, cell)) for cell in panel.cells}
        table, rows = [], []
        for plain, http in INTERFACES.items():
            if plain not in steps or http not in steps:
                continue
            for kind in ("hit", "miss"):
                inside, over = (named(steps[name][1], kind) for name in (plain, http))
                found = {"inside": ttft(inside), "over_http": ttft(over), "difference": http_ms(inside, over)}
                table.append(
                    {
                        "engine": plain,
                        "query": kind,
                        "in process\n(ms)": tables.estimated(found["inside"]),
                        "over HTTP\n(ms)": tables.estimated(found["over_http"]),
                        "difference\n(ms)": tables.estimated(found["difference"]),
                    }
                )
                rows += [
                    {
                        "engine": plain,
                        "query": kind,
                        "quantity": name,
                        **columns("ttft_ms", estimate),
                        "trials": f"{steps[plain][0].ids} {steps[http][0].ids}",
                    }
                    for name, estimate in found.items()
                ]
        yield Plot(panel, None, lead, rows, table)
