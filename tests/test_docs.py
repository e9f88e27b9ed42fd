"""docs/architecture.md names the files, the layers and the route of a request as they are."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.crossings import restored_turn

CHECKOUT = Path(__file__).resolve().parents[1]
PAGE = (CHECKOUT / "docs" / "architecture.md").read_text()
FOLDERS = ("pensieve", "analysis", "runners")


def block_of(title):
    """The first code block under a heading."""
    return PAGE.split(f"\n## {title}\n")[1].split("```\n")[1].split("\n")[:-1]


def paths_in(tree):
    """What an indented tree names under FOLDERS, folders with a slash at their end; every line has a clause."""
    found, above = [], []
    for line in tree:
        match = re.fullmatch(r"( *)([\w./]+) {2,}(\S.*)", line)
        if match is None or (not match[1] and match[2].rstrip("/") not in FOLDERS):
            assert not line.startswith(" "), f"no name and clause: {line}"
            continue
        above = [*above[: len(match[1]) // 2], match[2]]
        found.append("".join(above))
    return found


def modules():
    """Every Python module but __init__.py."""
    files = [file for folder in FOLDERS for file in (CHECKOUT / folder).rglob("*.py") if file.name != "__init__.py"]
    return {str(file.relative_to(CHECKOUT)) for file in files}


def test_every_module_is_in_the_tree():
    assert sorted(modules() - set(paths_in(block_of("The tree")))) == []


def test_every_name_of_the_tree_exists_and_stands_there_once():
    named = paths_in(block_of("The tree"))
    assert [path for path in named if not (CHECKOUT / path).exists()] == []
    assert sorted(named) == sorted(set(named))


def test_the_layers_are_those_that_are_enforced():
    configured = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    [layers] = [one for one in configured["tool"]["importlinter"]["contracts"] if one["type"] == "layers"]
    assert block_of("Import layers") == layers["layers"]


def test_the_route_names_the_files_that_a_turn_crosses():
    route = PAGE.split("\n## The route of one request\n")[1].split("\n## ")[0]
    named = re.findall(r"^\| `([\w/]+\.py)` \|", route, flags=re.MULTILINE)
    assert sorted(named) == sorted(restored_turn().calls)


def glossary():
    """Word, and the files and folders of the package where it is never used."""
    table = PAGE.split("\n## One word an idea\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")]
    return {row[0].strip(): row[2].split() for row in rows[1:]}


@pytest.mark.parametrize("word", [word for word, places in glossary().items() if places])
def test_a_word_is_not_used_where_it_would_mean_something_else(word):
    used = re.compile(rf"(?<![a-z]){word}(s|ed)?(?![a-z])", re.IGNORECASE)
    wrong = []
    for place in (CHECKOUT / "pensieve" / name for name in glossary()[word]):
        assert place.exists(), place
        files = [*place.rglob("*.py"), *place.rglob("*.c")] if place.is_dir() else [place]
        for file in files:
            text = re.sub(r"\bslots=True|__slots__", "", file.read_text())
            wrong += [f"{file.name}: {line.strip()}" for line in text.splitlines() if used.search(line)]
    assert not wrong


@pytest.mark.parametrize(
    "page",
    [*CHECKOUT.glob("*.md"), *sorted((CHECKOUT / "docs").rglob("*.md"))],
    ids=lambda page: str(page.relative_to(CHECKOUT)),
)
def test_links_of_a_page_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_changelog_has_the_version_that_is_packaged():
    version = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["version"]
    headings = re.findall(r"^## (.+)$", (CHECKOUT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert next(heading for heading in headings if heading != "Unreleased") == version


@pytest.mark.parametrize("term", ["working set", "retention value", "partly open"])
def test_a_term_of_the_tables_is_explained_in_the_glossary(term):
    glossary = (CHECKOUT / "docs" / "numbers.md").read_text().split("\n## Terms\n")[1].split("\n## ")[0]
    assert any(term in row.split("|")[1] for row in glossary.splitlines() if row.startswith("|"))


def test_the_version_that_is_cited_is_the_one_that_is_packaged():
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    cited = re.findall(r"^(version|license): (.+)$", (CHECKOUT / "CITATION.cff").read_text(), flags=re.MULTILINE)
    assert dict(cited) == {"version": project["version"], "license": project["license"]}


@pytest.mark.parametrize("page", sorted((CHECKOUT / "docs" / "results").glob("[!ig]*.md")), ids=lambda page: page.name)
def test_a_finding_has_a_question_a_command_a_table_a_verdict_and_a_meaning(page):
    findings = page.read_text().split("\n## ")[1:]
    assert findings
    for finding in findings:
        heading = finding.split("\n")[0]
        lines = re.findall(r"^\*\*(\w+)\.\*\*", finding, flags=re.MULTILINE)
        assert lines == ["Asked", "Command", "Verdict", "Means"], heading
        assert "\n|---" in finding, heading
