"""Everything here is marked gpu. Without a CUDA device it runs on the stand-in of tests/cuda, as far as that goes: tests
that time a device, fill it, take minutes of a CPU, or start a process of their own are marked `real_device` and skipped.
PENSIEVE_STAND_IN=0 skips all of them; PENSIEVE_STAND_IN=all runs the marked ones too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cuda.standin.findings import listed
from tests.cuda.standin.install import stand_in, why_not
from tests.cuda.standin.machine import Machine

from .small import small_model

_HERE = Path(__file__).parent
_REAL = torch.cuda.is_available()
_WHY_NOT = "PENSIEVE_STAND_IN=0" if os.environ.get("PENSIEVE_STAND_IN") == "0" else why_not()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if _REAL:
            continue
        if _WHY_NOT:
            item.add_marker(pytest.mark.skip(reason=f"needs a CUDA device, and has no stand-in: {_WHY_NOT}"))
        elif item.get_closest_marker("real_device") and os.environ.get("PENSIEVE_STAND_IN") != "all":
            item.add_marker(pytest.mark.skip(reason="needs a real CUDA device"))
        else:
            item.add_marker(pytest.mark.slow)  # values are computed on a CPU


@pytest.fixture(scope="package", autouse=True)
def _installed() -> Iterator[Machine | None]:
    if _REAL or _WHY_NOT:
        yield None
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with stand_in() as machine:
        yield machine
    small_model.cache_clear()
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _nothing_is_found(_installed: Machine | None) -> Iterator[None]:
    """What no assertion about values shows: races, copies that wait, captures that go wrong."""
    if _installed is not None:
        _installed.forget()
    yield
    if _installed is not None:
        assert not _installed.findings, listed(_installed.findings)
