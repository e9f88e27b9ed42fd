"""A sweep as one HTML page with a verdict for each claim: python analysis/report.py [--sweep ID]

Reads the results database and runs nothing. The page needs no network and no other file; it goes to outputs/reports, and
to the sweep's parent run in MLflow where it has one. The verdicts go to table `claim`, in place of earlier ones.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from analysis import figures, registry, style
from analysis.page import document, outcomes, particulars
from analysis.page.document import Page, Picture, Verdicted
from analysis.sweep import Source
from pensieve.errors import PensieveError, ResultsError
from pensieve.lab.compose.folder import conf_folder
from pensieve.lab.results.claims import Claim, Judged, judge_sweep, read_claims, record_claims
from pensieve.lab.results.mlflow_runs import log_text_of_sweep
from pensieve.lab.results.store import report_file


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    outputs = style.outputs_folder()
    try:
        claims = read_claims(options.claims or conf_folder() / "claims.yaml")
        source = figures.chosen_source(figures.chosen_store(options), options, options.sweep)
        path = options.to or report_file(outputs, source.sweep.id)
        path.parent.mkdir(parents=True, exist_ok=True)
        judged = judge_sweep(source.store, source.sweep.id, claims)
        with tempfile.TemporaryDirectory() as folder:
            html = document.render(build(source, judged, Path(folder)))
        path.write_text(html, encoding="utf-8")
        print(path)
        _keep(source, judged, html, outputs)
    except PensieveError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"The report cannot be written: {error}; set PENSIEVE_OUTPUTS, or --to FILE.", file=sys.stderr)
        return 1
    return 0


def build(source: Source, judged: Sequence[Judged], folder: Path) -> Page:
    """The sweep as a page; its figures are drawn into `folder`, where the page's rendering reads them."""
    pictures, not_drawn = _figures(source, folder)
    sweep, warnings = source.sweep, particulars.warnings(source)
    return Page(
        title=particulars.title(source),
        subtitle=particulars.subtitle(source),
        facts=particulars.facts(source),
        warnings=warnings,
        answers=[sentence for sentence in outcomes.answers(source) if sentence not in warnings],
        results=outcomes.results(source),
        notes=outcomes.notes(source),
        verdicts=[verdicted(one) for one in judged],
        pictures=document.leading_first(pictures),
        not_drawn=not_drawn,
        failures=particulars.failures(source),
        flags=particulars.flags(source),
        configuration=particulars.configuration(source),
        environment=particulars.environment(source),
        engines=particulars.engines(source),
        trials=particulars.trials(source),
        commands=particulars.commands(source),
        written=f"Sweep {sweep.id}, written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC from the results database alone.",
    )


def verdicted(one: Judged) -> Verdicted:
    """A verdict in words."""
    bounds, unit, found = one.claim.claimed.bounds(), one.claim.unit, one.measured
    return Verdicted(
        name=one.name,
        verdict=one.judgement.verdict,
        why=one.differences or (_sentence(one.judgement.why),),
        text=f"{one.claim.text}{f' ({one.group})' if one.group and one.name != one.claim.name else ''}",
        source=_source(one.claim),
        claimed=outcomes.with_unit(bounds.shown, unit),
        measured=outcomes.estimated(found.value, found.ci_low, found.ci_high, unit) if found else "",
        interval=document.interval(bounds, found) if found else None,
        stands_on=particulars.stands_on(one),
        simulated=one.simulated,
    )


def _figures(source: Source, folder: Path) -> tuple[list[Picture], list[tuple[str, str, str]]]:
    drawings, problems = figures.draw_all(source, folder, dark=True)
    pictures = [
        Picture(d.title, d.panel.text, d.png, [(d.pdf or d.text).name, d.csv.name], d.caption, _cells(d), d.dark)
        for d in drawings
    ]
    failed = [(name, why, "") for name, _, why in (problem.partition(": ") for problem in problems)]
    missing = [
        (figure.name, f"{figure.shows}; its trials come from", figure.command)
        for figure in registry.FIGURES.values()
        if not figure.applies(source)
    ]
    return pictures, [*failed, *missing]


def _cells(drawing: registry.Drawing) -> document.Table | None:
    """Of a figure that is a table."""
    if drawing.png is not None or drawing.table is None:
        return None
    return document.Table(drawing.table, words=1)


def _keep(source: Source, judged: Sequence[Judged], html: str, outputs: Path) -> None:
    try:
        record_claims(source.store, source.sweep.id, judged)
    except ResultsError as error:
        print(f"The verdicts were not recorded: {error}", file=sys.stderr)
    if source.sweep.mlflow_run_id is None:
        print(f"Not logged to MLflow: sweep {source.sweep.id} has no run there.")
    elif log_text_of_sweep(outputs, source.store, source.sweep.id, html, "report.html") is None:
        print(f"Not logged to MLflow: the run of sweep {source.sweep.id} is not in {outputs}.")
    else:
        print(f"Logged to MLflow as report.html of run {source.sweep.mlflow_run_id}.")


def _source(claim: Claim) -> str:
    return f"{claim.source[0].upper()}{claim.source[1:]}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}"


def _parser() -> argparse.ArgumentParser:
    found = figures.source_options(__doc__ or "")
    found.add_argument("--to", type=Path, help="file to write (default: reports/sweep-ID.html in the outputs folder)")
    found.add_argument("--claims", type=Path, help="file of claims (default: conf/claims.yaml)")
    return found


if __name__ == "__main__":
    sys.exit(main())
