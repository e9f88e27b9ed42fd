"""Real workload data beside the checkout, for the tests that reproduce its published statistics."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "data"


def shared(name: str) -> Path:
    """The file or folder, or the test is skipped with the reason."""
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"the recorded data {name} is not beside the checkout (../shared/data)")
    return path
