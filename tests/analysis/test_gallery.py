"""The page of our own figures: what it says of a recorded sweep, and what its questions name."""

import re
import sqlite3

import pytest
import yaml
from PIL import Image

from analysis import gallery, registry
from pensieve.lab.results.store import open_store
from tests.analysis.test_report import fill
from tests.test_words import too_much

ENTRY = {"name": "chat", "question": "Is it faster?", "command": "run.py -m", "figures": ["ttft_by_turn"]}


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes the page for these entries; returns its status and text."""
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path / "outputs"))
    (tmp_path / "outputs").mkdir()

    def write(*entries):
        (tmp_path / "entries.yaml").write_text(yaml.safe_dump(list(entries)))
        page = tmp_path / "page" / "gallery.md"
        status = gallery.main(["--to", str(page), "--entries", str(tmp_path / "entries.yaml")])
        return status, page.read_text() if page.is_file() else ""

    return write


def recorded(outputs, status="completed"):
    store = open_store(outputs)
    sweep = fill(store, seeds=1)
    store.set_sweep(sweep, status=status)


def test_a_recorded_sweep_is_drawn_with_its_question_command_data_machine_and_date(written, tmp_path):
    recorded(tmp_path / "outputs")
    status, page = written(ENTRY)
    assert status == 0
    for said in (
        "## Is it faster?\n",
        "| command | `run.py -m` |",
        "| machine | cpu |",
        "one_seed",
        "| 2 trials, seed 0 |",
    ):
        assert said in page
    [(ended,)] = sqlite3.connect(tmp_path / "outputs" / "results.db").execute("select max(finished_at) from trial")
    assert f"| date | {ended[:10]} |" in page
    linked = re.findall(r"\]\((gallery/[^)]+)\)", page)
    assert len(linked) == 3 and all((tmp_path / "page" / name).stat().st_size for name in linked)
    picture = tmp_path / "page" / "gallery" / "chat-ttft_by_turn.png"
    assert {path.name for path in picture.parent.iterdir()} == {name.split("/")[1] for name in linked}
    assert Image.open(picture).mode == "P", "a palette, which is a third of the bytes"


def test_a_missing_or_interrupted_sweep_is_named_by_its_command_and_the_page_stays(written, tmp_path, capsys):
    recorded(tmp_path / "outputs")
    _, before = written(ENTRY)
    assert written(ENTRY, ENTRY | {"command": "run.py other"}) == (1, before)
    assert capsys.readouterr().err == "No completed sweep is of this command; run it first: run.py other\n"
    (tmp_path / "outputs" / "results.db").unlink()
    recorded(tmp_path / "outputs", status="interrupted")
    assert written(ENTRY) == (1, before)


def test_the_page_of_the_project_is_of_its_questions_and_small():
    entries = [gallery.Entry(**entry) for entry in yaml.safe_load(gallery.ENTRIES.read_text())]
    assert {name for entry in entries for name in entry.figures} <= set(registry.FIGURES)
    page = gallery.PAGE.read_text()
    assert re.findall(r"^## (.+)\n\n\| command \| `(.+)` \|$", page, re.MULTILINE) == [
        (entry.question, entry.command) for entry in entries
    ]
    assert sum(path.stat().st_size for path in gallery.PAGE.with_suffix("").iterdir()) < 1_000_000
    assert too_much(page) == []
