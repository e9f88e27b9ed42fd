"""README.md and the pages of docs/ can be skimmed: short sentences, short lines, numbers in tables and not in paragraphs."""

import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
WORDS, LINE, NUMBERS = 35, 160, 9
"""Words of a sentence, characters of a line, numbers of a paragraph: what none may exceed."""
PAGES = [
    CHECKOUT / "README.md",
    CHECKOUT / "LOG.md",
    CHECKOUT / "CHANGELOG.md",
    *sorted((CHECKOUT / "docs").rglob("*.md")),
]


def prose(text: str) -> list[str]:
    """Paragraphs and items of lists, without code blocks, tables, headings and pictures."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = ["" if re.match(r"\||#|!\[", line) else line.removeprefix("> ") for line in text.splitlines()]
    return re.split(r"\n\s*\n|\n(?=\s*(?:-|\d+\.) )", "\n".join(lines).strip())


def plain(paragraph: str) -> str:
    """Without what is quoted from code, the addresses of links, and marks."""
    paragraph = re.sub(r"`[^`]+`", "code", paragraph)
    paragraph = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", paragraph)
    return " ".join(re.sub(r"^\s*-|[*>|]", " ", paragraph).split())


def too_much(text: str) -> list[str]:
    found = []
    for paragraph in prose(text):
        found += [f"a line of {len(line)} characters: {line}" for line in paragraph.splitlines() if len(line) > LINE]
        said = plain(paragraph)
        for sentence in re.split(r"(?<=[.?!])\s", said):
            if (words := len(sentence.split())) > WORDS:
                found.append(f"a sentence of {words} words: {sentence}")
        if (numbers := len(re.findall(r"(?<![\w.])\d[\d,.:]*", said))) > NUMBERS:
            found.append(f"a paragraph of {numbers} numbers, which belong in a table: {said}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_a_page_can_be_skimmed(page):
    assert too_much(page.read_text()) == []
