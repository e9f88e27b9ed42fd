"""Everything here runs on the stand-in for a CUDA device, and is skipped where there can be none."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from . import serving
from .standin.install import stand_in, why_not
from .standin.machine import Machine

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="graphs need the extra triton: pip install 'pensieve-lab[triton]'"
)


@pytest.fixture(scope="package")
def installed() -> Iterator[Machine]:
    """One for all tests, so that a model is loaded once."""
    if reason := why_not():
        pytest.skip(f"no stand-in for CUDA here: {reason}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with stand_in() as machine:
        yield machine
    serving.tiny.cache_clear()  # what was made on it is of no use after it
    torch.set_num_threads(threads)


@pytest.fixture
def device(installed: Machine) -> Machine:
    """As a test finds it: nothing found, and events that are reached at the third query."""
    installed.lag = 3
    installed.forget()
    return installed
