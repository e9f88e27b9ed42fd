"""README.md as a newcomer types it: each block runs or, where it takes minutes or a GPU, is checked up to its first trial."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from pensieve.lab.compose.conf import options
from pensieve.lab.compose.plan import plan_trial
from pensieve.lab.compose.settings import check
from pensieve.lab.trial.command import compose_jobs, plan_jobs
from tests.composed import hydra_session
from tests.test_recipes import NAMED, blocks_of
from tests.typed import typed

CHECKOUT = Path(__file__).resolve().parents[1]
README = (CHECKOUT / "README.md").read_text()
BLOCKS = blocks_of(README)
COMMANDS = [
    words
    for language, content in BLOCKS
    if not language
    for line in content.splitlines()
    if (words := shlex.split(line, comments=True) if re.match(r"(python|make|pensieve) ", line) else [])
]
SWEEPS = [words[2:] for words in COMMANDS if words[1] == "runners/run.py"]
SIMULATED = [arguments for arguments in SWEEPS if any(text.startswith("hardware=sim_") for text in arguments)]


def test_no_block_is_left_out():
    """A new kind of block, or a command that none of these tests knows, shows here."""
    known = {"runners/run.py", "runners/compare.py"}
    known |= {"runners/chat.py", "runners/size.py", "runners/profile.py"}  # driven in tests/server, trial and cost
    assert [words for words in COMMANDS if words[0] == "python" and words[1] not in known] == []
    assert {words[0] for words in COMMANDS} == {"python", "make"}
    assert {language for language, _ in BLOCKS} == {"", "python", "yaml", "bibtex"}
    assert len(SIMULATED) == 1


def made(*targets):
    """The commands, as words, that make types for these targets where all is installed."""
    if shutil.which("make") is None:
        pytest.skip("there is no make here")
    asked = ["make", "--no-print-directory", "-n", "-o", ".venv/.installed", *targets]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # `make test` runs this
    done = subprocess.run(asked, cwd=CHECKOUT, env=alone, capture_output=True, text=True, check=True)
    return [shlex.split(line) for line in done.stdout.replace("\\\n", "").splitlines()]


def test_make_types_what_is_there():
    asked = [words[1:] for words in COMMANDS if words[0] == "make"]
    asked += [[target] for target in re.findall(r"`make ([a-z]+)`", README)]
    assert {"demo", "test", "figures", "doctor"} <= {target for targets in asked for target in targets}
    for targets in asked:
        scripts = [word for command in made(*targets) for word in command if word.endswith(".py")]
        assert [name for name in scripts if not (CHECKOUT / name).is_file()] == []
    assert made("demo") == [[".venv/bin/python", "runners/run.py", "-m", "experiment=demo"]]


@pytest.mark.parametrize("arguments", [["-m"], *SWEEPS], ids=" ".join)
def test_every_sweep_is_understood_up_to_its_first_trial(arguments):
    with hydra_session():
        overrides = [text for text in arguments if text != "-m"]
        hydra = GlobalHydra.instance().hydra
        config = hydra.compose_config("config", overrides, RunMode.MULTIRUN, with_log_configuration=False)
        jobs = plan_jobs(config)
        assert len(jobs.jobs) > 1
        plan_trial(check(next(compose_jobs(config, jobs))))


def test_the_groups_are_those_of_conf():
    [listed] = re.findall(r"Hydra group in `conf/`: `([^`]+)`", README)
    folders = {path.name for path in (CHECKOUT / "conf").iterdir() if path.is_dir()} - {"hydra", "at", "figure"}
    assert set(listed.split()) == folders
    table = set(re.findall(r"^\| `(\w+)` \|", README, flags=re.MULTILINE))
    assert table <= set(options("baseline"))


def test_every_policy_is_in_the_page_that_the_readme_sends_to():
    policies = set(options("eviction"))
    told = set(re.findall(r"`(\w+)`", (CHECKOUT / "docs/policies.md").read_text()))
    assert policies <= told


@pytest.mark.slow
def test_the_simulated_sweep_runs_and_is_compared_drawn_and_reported_as_typed(tmp_path):
    """With one of its five seeds and a sixth of its conversations: no more is typed. `ui` of make's line is a server."""
    outputs = tmp_path / "outputs"
    swept = typed(
        "runners/run.py",
        *SIMULATED[0],
        "seed=0",
        "workload.conversations=40",
        "tracking.mlflow=false",
        outputs=outputs,
        cwd=CHECKOUT,
    )
    assert swept.returncode == 0, swept.stderr
    assert "stateless" in swept.stdout
    [(program, *arguments)] = [words[1:] for words in COMMANDS if words[1] == "runners/compare.py"]
    compared = typed(program, *arguments, outputs=outputs, cwd=CHECKOUT)
    assert compared.returncode == 0, compared.stderr
    assert "ttft_ms_mean" in compared.stdout
    assert "is better" in compared.stdout
    [(_, *targets)] = [words for words in COMMANDS if words[0] == "make" and "figures" in words]
    for _, program, *arguments in made(*[target for target in targets if target != "ui"]):
        done = typed(program, *arguments, outputs=outputs, cwd=CHECKOUT)
        assert done.returncode == 0, done.stderr
    drawn = {path.name for path in (outputs / "figures" / "latest").iterdir()}
    assert {"ttft_by_turn.png", "hit_rates.png", "speedup.md"} <= drawn
    assert "stateless" in (outputs / "reports" / "sweep-1.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_python_block_runs_as_typed(capsys):
    """In this process: a new one would import torch again."""
    [code] = [content for language, content in BLOCKS if language == "python" and not NAMED.match(content)]
    exec(compile(code, "README.md", "exec"), {})
    history, hits, ttft = capsys.readouterr().out.splitlines()[-5].split()
    assert int(history) == int(hits) > 0
    assert float(ttft) > 0
