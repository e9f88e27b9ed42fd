from dataclasses import replace

import pytest

from pensieve.lab.trial.tracking import open_tracking
from tests.composed import checked


@pytest.fixture
def tracking(tmp_path, monkeypatch):
    """A database in a folder of its own."""
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path))
    return replace(open_tracking(checked("tracking=local")), mlflow=False)
