"""What mkdocs.yml cannot say: pages above docs/, every page of docs/results, links to sources."""

import os
import re
from pathlib import Path

from mkdocs.structure.files import File

CHECKOUT = Path(__file__).resolve().parents[1]
ABOVE = {"index.md": "README.md", **{name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "LOG.md")}}
"""Page of the site -> file of the checkout."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


FIRST = ("index.md", "gallery.md")


def _place(page):
    return page.name not in FIRST, page.name != FIRST[0], page.name


def on_config(config):
    results = next(group["Results"] for group in config.nav if "Results" in group)
    docs = Path(config.docs_dir)
    results[:0] = [page.relative_to(docs).as_posix() for page in sorted((docs / "results").glob("*.md"), key=_place)]


def on_files(files, config):
    for page, source in ABOVE.items():
        files.append(File.generated(config, page, content=(CHECKOUT / source).read_text()))


def on_page_markdown(markdown, page, config, files):
    docs = Path(config.docs_dir)
    own = page.file.src_uri
    folder = CHECKOUT if own in ABOVE else (docs / own).parent

    def linked(match):
        mark, text, target, anchor = match[1], match[2], (folder / match[3]).resolve(), match[4] or ""
        if not target.exists():
            return match[0]  # --strict names it
        pages = {CHECKOUT / source: docs / at for at, source in ABOVE.items()}
        target = pages.get(target, target)
        if not target.is_relative_to(docs):
            return text  # a file of the checkout alone
        at = Path(os.path.relpath(target, (docs / own).parent)).as_posix()
        return f"{mark}[{text}]({at}{anchor})"

    return LINK.sub(linked, markdown)
