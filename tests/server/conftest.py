"""Nothing of a server happens on its own in these tests: what is swept, a test sweeps. And a model is loaded once for all
of their servers: how one is loaded is tested elsewhere."""

from collections.abc import Iterator
from contextlib import suppress

import pytest


@pytest.fixture(autouse=True, scope="package")
def one_model() -> Iterator[None]:
    from pensieve.device.shelf import open_shelf

    with open_shelf():
        yield


@pytest.fixture(autouse=True, scope="session")
def no_sweeps() -> None:
    with suppress(ModuleNotFoundError):  # of the extra serve: then there is none
        from pensieve.serve.server import app

        app.SWEEP_S = 1e6
