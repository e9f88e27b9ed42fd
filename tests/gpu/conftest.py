"""Everything here needs a CUDA device, and is skipped without one. PENSIEVE_STAND_IN=1 runs it on the stand-in of tests/cuda,
which takes minutes of a CPU: whether it runs at all, not how fast."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cuda.standin.install import stand_in, why_not
from tests.cuda.standin.machine import Machine

_REAL = torch.cuda.is_available()
_STAND_IN = not _REAL and os.environ.get("PENSIEVE_STAND_IN") == "1" and not why_not()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not (_REAL or _STAND_IN):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="package", autouse=True)
def _installed() -> Iterator[Machine | None]:
    if not _STAND_IN:
        yield None
        return
    with stand_in() as machine:
        yield machine


@pytest.fixture(autouse=True)
def _nothing_is_found(_installed: Machine | None) -> Iterator[None]:
    """What no assertion about values shows: races, copies that wait, captures that go wrong."""
    if _installed is not None:
        _installed.forget()
    yield
    assert _installed is None or not _installed.findings, _installed.findings
