"""Nothing of a server happens on its own in these tests: what is swept, a test sweeps."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def no_sweeps() -> None:
    app = pytest.importorskip("pensieve.server.app", reason="the extra serve is not installed")
    app.SWEEP_S = 1e6
