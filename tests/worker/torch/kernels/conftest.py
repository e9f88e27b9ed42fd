"""The tests that run the kernel in Triton's interpreter need TRITON_INTERPRET=1 before anything imports triton, which
transformers does. So they are collected only where it is set; test_interpreter.py runs them in a process where it is."""

import os
from importlib.util import find_spec

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
NAMES = ("paged", "conversation")
collect_ignore = [] if INTERPRETED else [f"test_{name}.py" for name in NAMES]
