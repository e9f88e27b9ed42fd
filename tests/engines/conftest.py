"""Every engine that a test began is closed after it."""

from collections.abc import Iterator

import pytest

from tests.engines.small import OPEN


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()
