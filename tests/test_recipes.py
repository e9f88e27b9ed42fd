"""docs/recipes.md: the files of each recipe are written out, its commands run, and what it promises is looked up."""

import csv
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.test_disk_exact import Talk
from tests.typed import typed

CHECKOUT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
UNFINISHED = shutil.ignore_patterns("*.pyc.*")  # what an interpreter beside this one is about to rename
NAMED = re.compile(r"# ([\w/]+\.(?:py|yaml))\b")


def blocks_of(text):
    """(language, content) of each code block."""
    return [match.groups() for match in BLOCK.finditer(text)]


def recipe(title):
    """The code blocks under one heading of the page."""
    page = (CHECKOUT / "docs" / "recipes.md").read_text()
    sections = dict(part.split("\n", 1) for part in page.split("\n## ")[1:])
    return blocks_of(sections[title])


def write_files(blocks, root):
    """Each block whose first line names a file: a diff is applied to it, anything else is its content.
    Conversations are those of mine.jsonl."""
    for language, content in blocks:
        if language == "jsonl":
            (root / "mine.jsonl").write_text(content)
        named = NAMED.match(content)
        if named is None:
            continue
        file = root / named[1]
        if language == "diff":
            file.write_text(patched(file.read_text(), content.split("\n", 1)[1]))
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)


def patched(text, diff):
    """The text with each hunk's old lines, which it must hold exactly once, replaced by the new ones."""
    for hunk in re.split(r"^@@.*@@\n", diff, flags=re.MULTILINE)[1:]:
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] if line[0] in " -" else line for line in lines if line[0] != "+")
        new = "".join(line[1:] if line[0] in " +" else line for line in lines if line[0] != "-")
        assert text.count(old) == 1, f"{text.count(old)} times:\n{old}"
        text = text.replace(old, new)
    return text


def run_commands(blocks, cwd, outputs, checkout=CHECKOUT, changed=("runners", "analysis")):
    """The recipe's commands; MLflow, which only copies the database, is left out. Commands in folders whose code is `changed`
    in the checkout need new processes; the others run in forks of this one, and a sweep then draws no figures."""
    given = {name: value for name, value in os.environ.items() if name not in ("PYTEST_CURRENT_TEST", "PYTHONPATH")}
    environment = {**given, "PENSIEVE_OUTPUTS": str(outputs), "PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}
    commands = [line for language, content in blocks if not language for line in content.splitlines()]
    assert commands
    for command in commands:
        python, script, *arguments = shlex.split(command)
        assert python == "python"
        extra = ["tracking.mlflow=false"] if script == "runners/run.py" else []
        if checkout == CHECKOUT or script.split("/")[0] not in changed:
            done = typed(script, *arguments, *extra, outputs=outputs, cwd=cwd)
        else:
            words = [sys.executable, str(checkout / script), *arguments, *extra]
            done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr


def rows(outputs, query):
    with sqlite3.connect(outputs / "results.db") as connection:
        return connection.execute(query).fetchall()


@pytest.fixture
def outputs(tmp_path):
    return tmp_path / "outputs"


@pytest.fixture
def copy(tmp_path):
    """A checkout that a recipe may change."""
    root = tmp_path / "checkout"
    for folder in ("pensieve", "analysis", "conf", "runners"):
        shutil.copytree(CHECKOUT / folder, root / folder, ignore=UNFINISHED)  # what is compiled stays compiled
    return root


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "column", "name", "promise", "kept"),
    [
        (
            "Your own conversations", "workload", "trace",
            "select count(*), count(distinct session), max(turn) from turn where phase != 'warmup'", (3, 2, 2),
        ),
        ("A model", "model", "small_llama", "select gpu_tokens, cpu_tokens from trial", (1408, 4224)),
        (
            "An eviction policy", "eviction", "my_policy",
            "select value > 0 from metric where name = 'evicted_chunks'", (1,),
        ),
        (
            "A baseline", "baseline", "head_only",
            "select max(gpu_hit_tokens + cpu_hit_tokens), max(history_tokens) > 128 from turn", (128, 1),
        ),
        (
            "A tier below the CPU's", "baseline", "second_pool",
            "select sum(disk_hit_tokens) > 0.1 * sum(history_tokens) from turn", (1,),
        ),
        (
            "A workload", "workload", "round_robin",
            "select count(*), count(distinct session), max(turn) from turn", (18, 6, 3),
        ),
    ],
)  # fmt: skip
def test_an_option_of_ones_own(title, column, name, promise, kept, tmp_path, outputs):
    blocks = recipe(title)
    write_files(blocks, tmp_path)
    run_commands(blocks, tmp_path, outputs)
    assert rows(outputs, f"select {column}, status, simulated from trial") == [(name, "completed", 1)]
    assert rows(outputs, "select distinct status from turn") == [("completed",)]
    assert rows(outputs, promise) == [kept]


def test_a_tier_below_the_cpu_brings_back_what_was_computed(tmp_path, monkeypatch):
    """Every token is compared with the plain model, and every invariant is checked after each step."""
    write_files(recipe("A tier below the CPU's"), tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    pool = import_module("second_pool").SecondPool(blocks=24, gb_per_s=8.0)
    talk, found = Talk(tmp_path, gpu=16, cpu=6, below=pool), 0
    for name in "abcd" * 4:
        found += talk.ask(name, tokens=24).disk_hit_tokens
    talk.close()
    assert found > 100 and pool.used == pool.blocks


def test_the_policy_of_the_readme_is_the_one_of_the_recipe():
    readme = (CHECKOUT / "README.md").read_text()
    shown = [block for block in blocks_of(readme) if NAMED.match(block[1])]
    assert shown == [block for block in recipe("An eviction policy") if NAMED.match(block[1])]


@pytest.mark.slow
def test_a_metric(copy, outputs):
    blocks = recipe("A metric")
    write_files(blocks, copy)
    run_commands(blocks, copy, outputs, copy)
    [(value, unit, n)] = rows(outputs, "select value, unit, n from metric where name = 'longest_prompt_tokens'")
    [(longest, turns)] = rows(outputs, "select max(prompt_tokens), count(*) from turn where phase != 'warmup'")
    assert (value, unit, n) == (longest, "tokens", turns)


@pytest.mark.slow
def test_a_figure(copy, outputs):
    """A metric of its own and its figure over two axes, in fewer than 30 lines of two files."""
    blocks = recipe("A figure")
    files = [content for language, content in blocks if language]
    assert len(files) == 2 and sum(len(content.splitlines()) for content in files) < 30
    write_files(blocks, copy)
    run_commands(blocks, copy, outputs, copy, changed=("analysis",))
    drawn = outputs / "figures" / "latest"
    assert (drawn / "second_token.png").read_bytes().startswith(b"\x89PNG")
    with (drawn / "second_token.csv").open(newline="") as file:
        found = {row["trials"]: row for row in csv.DictReader(file)}
    assert {(row["cache.gpu"], row["workload.turns_per_s"]) for row in found.values()} == {
        (size, rate) for size in ("2000", "8000") for rate in ("1000.0", "5000.0")
    }
    counts = "phase != 'warmup' and status = 'completed'"
    for trial, arrived in (
        (key, rows(outputs, f"select session, turn, arrived_s from turn where {counts} and trial_id = {key}"))
        for key in found
    ):
        [(path,)] = rows(outputs, f"select path from artifact where kind = 'tokens' and trial_id = {trial}")
        tokens = pq.read_table(outputs / path).to_pylist()
        second = {(row["session"], row["turn"]): row["emitted_s"] for row in tokens if row["position"] == 1}
        times = sorted(1e3 * (second[session, turn] - at) for session, turn, at in arrived if (session, turn) in second)
        assert float(found[trial]["second_token_ms"]) == pytest.approx(times[(len(times) - 1) // 2])
