"""What a figure drew, taken from it just before it is saved."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from matplotlib import pyplot as plt

from analysis import style
from pensieve.lab.results.store import ResultsStore
from tests.analysis.sweeps import Drawn
from tests.results.trials import MEMORY


@pytest.fixture
def store() -> ResultsStore:
    return ResultsStore(MEMORY)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Drawn]]:
    """File stem -> what was drawn; nothing is rendered. Files are still written, empty, so that scripts can name them."""
    found: dict[str, Drawn] = {}

    def save(figure, stem, title, caption):
        found[stem.name] = Drawn(figure, caption)
        stem.parent.mkdir(parents=True, exist_ok=True)
        paths = [stem.with_name(stem.name + suffix) for suffix in (".png", ".pdf", ".txt")]
        for path in paths:
            path.touch()
        plt.close(figure)
        return paths

    monkeypatch.setattr(style, "save", save)
    yield found
    plt.close("all")


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path))
    return tmp_path
