"""A sweep as one HTML page with a verdict for each claim: python analysis/report.py [--sweep ID]

Reads the results database and runs nothing. The page needs no network and no other file; it goes to outputs/reports, and
to the sweep's parent run in MLflow where it has one. The verdicts go to table `claim`, in place of earlier ones.
"""

import argparse
import sys
import tempfile
from base64 import b64encode
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from analysis import figures
from analysis.page.contents import contents
from analysis.sweep import Source
from pensieve.errors import PensieveError, ResultsError
from pensieve.lab.compose.conf import conf_folder, outputs_folder
from pensieve.lab.results.claims import Judged, judge_sweep, read_claims, record_claims
from pensieve.lab.results.mlflow_runs import copy_sweep
from pensieve.lab.results.store import report_file

PAGE = Path(__file__).with_name("page")


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    outputs = outputs_folder()
    try:
        claims = read_claims(options.claims or conf_folder() / "claims.yaml")
        source = figures.chosen_source(options)
        path = options.to or report_file(outputs, source.sweep.id)
        path.parent.mkdir(parents=True, exist_ok=True)
        judged = judge_sweep(source.store, source.sweep.id, claims)
        with tempfile.TemporaryDirectory() as folder:
            html = render(source, judged, Path(folder))
        path.write_text(html, encoding="utf-8")
        print(path)
        _keep(source, judged, outputs)
    except PensieveError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"The report cannot be written: {error}; set PENSIEVE_OUTPUTS, or --to FILE.", file=sys.stderr)
        return 1
    return 0


def render(source: Source, judged: Sequence[Judged], folder: Path) -> str:
    """The sweep as a page: style and pictures are inside, and every value is escaped. Figures are drawn into `folder`."""
    drawings, problems = figures.draw_all(source, folder)
    environment = Environment(
        loader=FileSystemLoader(PAGE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["base64"] = lambda path: b64encode(path.read_bytes()).decode("ascii")
    return environment.get_template("page.html.j2").render(
        contents(source, judged), drawings=drawings, problems=problems, written=datetime.now(UTC),
        style=Markup((PAGE / "page.css").read_text(encoding="utf-8")),
    )  # fmt: skip


def _keep(source: Source, judged: Sequence[Judged], outputs: Path) -> None:
    try:
        record_claims(source.store, source.sweep.id, judged)
    except ResultsError as error:
        print(f"The verdicts were not recorded: {error}", file=sys.stderr)
    run = source.sweep.mlflow_run_id
    if run is not None and copy_sweep(outputs, source.store, source.sweep.id) is not None:
        print(f"Logged to MLflow as report.html of run {run}.")


def _parser() -> argparse.ArgumentParser:
    found = figures.source_options(__doc__ or "")
    found.add_argument("--to", type=Path, help="file to write (default: reports/sweep-ID.html in the outputs folder)")
    found.add_argument("--claims", type=Path, help="file of claims (default: conf/claims.yaml)")
    return found


if __name__ == "__main__":
    sys.exit(main())
