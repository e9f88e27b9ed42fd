import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from .conftest import INTERPRETED


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="runs in the process that this test would start")
@pytest.mark.skipif(
    find_spec("triton") is None, reason="the extra triton is not installed: pip install 'pensieve-lab[triton]'"
)
def test_the_kernel_in_tritons_interpreter() -> None:
    """All of this folder, with TRITON_INTERPRET=1: TRITON_INTERPRET=1 pytest tests/worker/torch/kernels by hand."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-v", "-p", "no:cacheprovider", "test_attend.py", "test_paged.py"],
        cwd=Path(__file__).parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
