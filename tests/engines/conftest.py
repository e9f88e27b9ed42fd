"""Every engine that a test began is closed after it, and the server that it asked."""

import os
from collections.abc import Iterator

import pytest

from tests.engines.endpoint import Endpoint
from tests.engines.small import OPEN


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


@pytest.fixture
def one_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One folder for what vLLM finds out at its first start, which takes four times as long as the next one: of all workers
    of pytest-xdist, whose folders lie beside each other."""
    own = tmp_path_factory.getbasetemp()
    monkeypatch.setenv("XDG_CACHE_HOME", str((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "vllm"))


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    yield server
    server.shutdown()
    server.server_close()
