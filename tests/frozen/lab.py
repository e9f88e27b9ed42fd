"""What the laboratory shows of recorded sweeps: every figure's CSV, caption and sidecar, reports, tables, notes, comparisons,
verdicts of claims, lists and exports. None of it may change while the code is rebuilt.

python -m tests.frozen.lab [SWEEP ...]                 compare all sweeps, or these, with what is frozen
python -m tests.frozen.lab --write [SWEEP ...]         freeze anew, and say what was other before
python -m tests.frozen.lab --show FOLDER [SWEEP ...]   both sides as FOLDER/was and FOLDER/now, for diff -r

sweeps.tar.xz holds the database as SQL, and tokens of a real sweep. Table sweep says which command made which sweep. By hand:
the benchmarks; "broken" with a failed, an interrupted and a running trial; "mixed" of simulated and real trials; "contended".
"""

import argparse
import hashlib
import io
import json
import lzma
import re
import sqlite3
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from matplotlib import pyplot as plt

from analysis import figures, report, style
from pensieve import cli
from pensieve.errors import PensieveError
from pensieve.lab.compose.conf import conf_folder
from pensieve.lab.results.claims import judge_sweep, read_claims
from pensieve.lab.results.compare_trials import compare_trials, select_trials
from pensieve.lab.results.store import ResultsStore, open_store
from pensieve.lab.results.sweep_table import sweep_table

HERE = Path(__file__).parent
SWEEPS, FROZEN = HERE / "sweeps.tar.xz", HERE / "lab.tar.xz"
WIDTH = 260
LONG = 100_000
"""Of a longer file the beginning is kept, and its digest."""

COMPARED = {
    "pensieve,stateless": ("sweep=1,baseline=pensieve", "sweep=1,baseline=stateless"),
    "five-seeds": ("sweep=2,baseline=pensieve", "sweep=2,baseline=prefix_cache"),
    "policies": ("sweep=3,eviction=lru", "sweep=3,eviction=belady"),
    "replicas": ("sweep=5,hardware.router=affinity", "sweep=5,hardware.router=random"),
    "agents": ("sweep=7,baseline=pensieve", "sweep=7,baseline=stateless"),
    "real": ("sweep=13,baseline=pensieve", "sweep=13,baseline=stateless"),
    "objective": ("sweep=14,baseline=pensieve", "sweep=14,baseline=stateless"),
    "mixed": ("sweep=21,simulated=true", "sweep=21,simulated=false"),
    "nothing": ("sweep=1", "sweep=5"),
}
EXACT = re.compile(r"-?\d+\.\d{9,}(e[+-]?\d+)?")
CHANGING = [
    (re.compile(r"written [\d-]{10} [\d:]{5} UTC"), "written TIME UTC"),
    (re.compile(r"data:image/png;base64,[^\"]+"), "PICTURE"),
    (re.compile(r"<style>.*?</style>", re.DOTALL), "STYLE"),
]


@contextmanager
def recorded() -> Iterator[Path]:
    """The outputs folder with the recorded sweeps. Nothing is rendered: of a picture its caption is kept. The trials of
    a sweep, which nobody changes here, are read once and not for each figure; and its figures drawn once, also for its
    report."""
    of_sweep, draw_all, drawn = ResultsStore.trials_of_sweep, figures.draw_all, dict[int, Any]()

    def draw_once(source: Any, *given: Any) -> Any:
        if source.sweep.id not in drawn:
            drawn[source.sweep.id] = draw_all(source, *given)
        return drawn[source.sweep.id]

    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        with tarfile.open(SWEEPS) as archive:
            archive.extractall(folder, filter="data")
        with sqlite3.connect(folder / "results.db") as database:
            database.executescript((folder / "results.sql").read_text())
        database.close()
        patch.setattr(ResultsStore, "interrupt_dead", lambda _: 0)  # one was recorded while it ran
        patch.setenv("PENSIEVE_OUTPUTS", name)
        trials = cache(lambda sweep: of_sweep(open_store(folder, create=False), sweep))
        patch.setattr(ResultsStore, "trials_of_sweep", lambda _, sweep: [*trials(sweep)])
        patch.setattr(figures, "draw_all", draw_once)
        patch.setenv("COLUMNS", "220")
        patch.setattr(style, "save", _not_rendered)
        yield folder


def _not_rendered(figure: Any, stem: Path, title: str, caption: str) -> list[Path]:
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(stem.name + suffix) for suffix in (".png", ".pdf", ".txt")]
    for path in paths:
        path.write_bytes(b"a picture")
    paths[2].write_text(f"{caption}\n", encoding="utf-8")
    plt.close(figure)
    return paths


def said(run: Callable[[], object], *words: str) -> str:
    """What a command prints, its errors and its status included."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(out):
        patch.setattr(sys, "argv", ["", *words])
        try:
            status = run()
        except SystemExit as left:
            status = left.code
    return f"{out.getvalue()}status {status}\n"


def shown(store: ResultsStore, sweep: int, folder: Path) -> Iterator[tuple[str, str]]:
    """(file, text) of everything about a sweep."""
    to, number = folder / "shown" / str(sweep), str(sweep)
    for name, command, words in (
        ("figures", figures.main, ["--sweep", number, "--to", str(to / "figures")]),
        ("report", report.main, ["--sweep", number, "--to", str(to / "report.html")]),
        ("notes", cli.results, ["notes", number]),
        ("export", cli.results, ["export", number, "--to", str(to / "export")]),
        ("list", cli.results, ["list", "--sweep", number]),
    ):
        yield f"{name}.txt", said(partial(command, words)).replace(f"{to}/", "")
    yield "table.txt", sweep_table(store, sweep).text(WIDTH)
    claims = read_claims(conf_folder() / "claims.yaml")
    judged = ({**asdict(one), "claim": one.claim.text} for one in judge_sweep(store, sweep, claims))
    yield "claims.json", "".join(json.dumps(one) + "\n" for one in judged)
    for file in sorted(path for path in to.rglob("*") if path.suffix in (".csv", ".txt", ".md", ".json", ".html")):
        text = file.read_bytes().decode()
        if file.suffix == ".html":
            text = text.replace("><", ">\n<")
        yield str(file.relative_to(to)), text


def compared(store: ResultsStore) -> Iterator[tuple[str, str]]:
    for name, words in COMPARED.items():
        yield f"{name}.txt", said(cli.compare, *words, "--all")
        with suppress(PensieveError):
            a, b = (select_trials(store, one) for one in words)
            yield f"{name}.json", "".join(json.dumps(asdict(row)) + "\n" for row in compare_trials(store, a, b).rows)


def now(folder: Path, sweep: int | None) -> dict[str, str]:
    """File -> text of one of the recorded sweeps, or of what is shown of all together."""
    store = open_store(folder, create=False)
    if sweep is not None:
        found = {f"{sweep}/{name}": text for name, text in shown(store, sweep, folder)}
    else:
        found = {f"compare/{name}": text for name, text in compared(store)}
        found["list.txt"] = said(lambda: cli.results(["list", "--limit", "0"]))
        for trial in (1, 61, 150):
            found[f"show-{trial}.txt"] = said(partial(cli.results, ["show", str(trial)]))
    return {file: _kept(text.replace(str(folder), "OUTPUTS")) for file, text in found.items()}


def sweep_of(file: str) -> int | None:
    """None of what is of all together."""
    first = file.partition("/")[0]
    return int(first) if first.isdigit() else None


def sweeps_of(files: Iterable[str]) -> list[int | None]:
    found = {sweep_of(file) for file in files}
    return [*sorted(one for one in found if one is not None), None]


def _kept(text: str) -> str:
    """Without what changes from run to run, and the last digits, in which processors may differ."""
    text = EXACT.sub(lambda found: f"{float(found[0]):.9g}", text)
    for what, instead in CHANGING:
        text = what.sub(instead, text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return text if len(text) <= LONG else f"{text[:LONG]}\n... {len(text)} characters, {digest}\n"


def frozen() -> dict[str, str]:
    with tarfile.open(FROZEN) as archive:
        return {one.name: archive.extractfile(one).read().decode() for one in archive}  # type: ignore[union-attr]


def write(found: dict[str, str]) -> None:
    with lzma.open(FROZEN, "wb") as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for name in sorted(found):
            data = found[name].encode()
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


def differences(was: dict[str, str], found: dict[str, str]) -> list[str]:
    """A line for each file that is not as it was: its first line that differs."""
    lines = []
    for name in sorted({*was, *found}):
        before, after = (one.get(name) for one in (was, found))
        if before is None or after is None:
            lines.append(f"{name} is {'new' if before is None else 'gone'}")
        elif before != after:
            pairs = zip([*before.splitlines(), "<end>"], [*after.splitlines(), "<end>"], strict=False)
            place, (one, other) = next((at, pair) for at, pair in enumerate(pairs, 1) if pair[0] != pair[1])
            lines.append(f"{name}:{place}\n  was {one[:300]}\n  now {other[:300]}")
    return lines


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("sweeps", type=int, nargs="*")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--show", type=Path, metavar="FOLDER")
    asked = parser.parse_args(words)
    every = frozen()
    sweeps = asked.sweeps or sweeps_of(every)
    was = {name: text for name, text in every.items() if sweep_of(name) in sweeps}
    with recorded() as folder:
        found = {name: text for sweep in sweeps for name, text in now(folder, sweep).items()}
    if asked.write:
        write({**{name: text for name, text in every.items() if name not in was}, **found})
    if asked.show:
        for side, files in (("was", was), ("now", found)):
            for name, text in files.items():
                (asked.show / side / name).parent.mkdir(parents=True, exist_ok=True)
                (asked.show / side / name).write_text(text)
    lines = differences(was, found)
    print(*lines, f"{len(found)} files, {len(lines)} {'were others' if asked.write else 'differ'}", sep="\n")
    return bool(lines) and not asked.write


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
