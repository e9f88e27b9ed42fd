"""The Dockerfile, read line by line: what it copies is there, and what it runs is this project's command."""

import re
import tomllib
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
LINES = re.sub(r"\\\n\s*", "", (CHECKOUT / "Dockerfile").read_text()).splitlines()
STEPS = [tuple(line.split(maxsplit=1)) for line in LINES if line and not line.startswith("#")]
COPIED = {name for word, rest in STEPS if word == "COPY" for name in rest.split()[:-1]}


def test_what_is_copied_is_there_and_sent_to_the_builder():
    ignored, *sent = (CHECKOUT / ".dockerignore").read_text().split()
    assert ignored == "*"
    assert {name for name in sent if name.startswith("!")} == {f"!{name}" for name in COPIED}
    assert [name for name in COPIED if not (CHECKOUT / name).exists()] == []


def test_all_that_the_wheel_is_built_from_is_copied():
    project, wheel = PROJECT["project"], PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {
        "pyproject.toml",
        project["readme"],
        *project["license-files"],
        *wheel["packages"],
        *wheel["force-include"],
    }
    assert needed <= COPIED
