"""Triton's interpreter needs TRITON_INTERPRET=1 before anything imports triton, which transformers does. What it runs
alone is collected only where that is set; test_compile.py runs it in a process where it is."""

import os
from importlib.util import find_spec

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
collect_ignore = [] if INTERPRETED else ["test_paged.py"]
