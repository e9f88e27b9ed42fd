"""Every engine that a test began is closed after it, and the server that it asked."""

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
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    yield server
    server.shutdown()
    server.server_close()
