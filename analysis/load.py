"""Against a swept load: what was offered, and requests a second at the latency at which the paper compared its systems."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from statistics import fmean

from analysis.forms import Form
from analysis.quantities import over_seeds
from analysis.registry import Plot, Row
from analysis.sweep import Source
from pensieve.errors import MissingSeries
from pensieve.lab.compose.conf import conf_folder
from pensieve.lab.results.claims import Claim, rates_at, read_claims, unmet
from pensieve.lab.results.frame import Cell, Panel, positive_ratio
from pensieve.lab.results.notes import load_changed, noted, plan_of
from pensieve.lab.results.schema import Trial
from pensieve.units import number

STATISTICS = ("mean", "p90")
MEASURE = "throughput_at_latency_ratio"


def offered_rate(source: Source, cell: Cell) -> float | None:
    """Requests a second that the trials were offered in steady state (their mean); None where replies alone decide the rate,
    or the record of one does not say."""
    rates = [plan_of(trial).get("request_rate_per_s") for trial in cell.trials]
    known = [float(rate) for rate in rates if rate is not None]
    return fmean(known) if len(known) == len(rates) else None


# Beside the paper


@lru_cache(maxsize=1)
def _claims() -> Sequence[Claim]:
    return [claim for claim in read_claims(conf_folder() / "claims.yaml") if claim.measure == MEASURE]


def compared(trials: Sequence[Trial]) -> Claim | None:
    """The paper's result that these trials repeat: same model, data, devices and cache."""
    return next((claim for claim in _claims() if trials and not unmet(claim.conditions, trials)), None)


def repeats_the_paper(source: Source) -> bool:
    return compared(source.trials) is not None


def _by_load(cells: Sequence[Cell], axis: str) -> list[tuple[float, Trial]]:
    return [(number(cell.at[axis]) or 0.0, trial) for cell in cells for trial in cell.trials]


def at_the_papers_latency(source: Source, form: Form) -> Iterator[Plot]:
    """A line a system and statistic, since the paper says 90th percentile in one place and mean in another. Where a system
    saturates is where it has to be measured, so not all have run at all loads."""
    axis = source.load_axis
    assert axis is not None, "asked only where it applies"
    for panel in source.panels(axis):
        trials = [trial for cell in panel.cells for trial in cell.trials]
        claim = compared(trials)
        assert claim is not None, "asked only where it applies"
        limit = float(claim.arguments["limit"])
        reference = next((name for name in claim.against if name in panel.baselines), None)
        if reference is None:
            raise MissingSeries(
                f"Sweep {source.sweep.id} has none of {', '.join(claim.against)} to compare with; add baseline=stateless."
            )
        rows: list[Row] = []
        for statistic in STATISTICS:
            latency = f"normalized_latency_ms_{statistic}"
            reached = {
                name: rates_at(source, _by_load(panel.of(name), axis), limit, latency, "throughput_req_s")
                for name in panel.baselines
            }
            for name, values in reached.items():
                ratio = positive_ratio(values, reached[reference]) if name != reference else None
                paper = claim.claimed.number if name in claim.of else None
                ran = {(trial.seed, trial.repeat) for cell in panel.of(name) for trial in cell.trials}
                rows.append(
                    {
                        "baseline": name,
                        "statistic": statistic,
                        "limit_ms_per_token": limit,
                        "requests_per_s": over_seeds(values) if values else None,
                        "reached": f"{len(values)} of {len(ran)}",
                        "reference": reference,
                        "ratio": ratio,
                        "paper": paper,
                        "difference_pct": 100 * (ratio.value / paper - 1) if ratio and paper else None,
                        "trials": " ".join(cell.ids for cell in panel.of(name)),
                    }
                )
        groups = [Panel(cell.at, [cell]) for cell in panel.cells]
        words = {
            "cut": "".join(f"{note.text} " for note in noted(load_changed(groups))),
            "paper": f"{claim.source}, {claim.text}",
        }
        yield Plot(panel, rows, words=words)
