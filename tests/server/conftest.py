"""Nothing of a server happens on its own in these tests: what is swept, a test sweeps."""

from __future__ import annotations

from contextlib import suppress

import pytest


@pytest.fixture(autouse=True, scope="session")
def no_sweeps() -> None:
    with suppress(ModuleNotFoundError):  # of the extra serve: then there is none
        from pensieve.server import app

        app.SWEEP_S = 1e6
