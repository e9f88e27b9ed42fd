"""The tests that run the kernel in Triton's interpreter need TRITON_INTERPRET=1 before anything imports triton, which
transformers does. So they are collected only where it is set; test_interpreter.py runs them in a process where it is."""

import os
from importlib.util import find_spec

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
collect_ignore = (
    [] if INTERPRETED else ["test_paged.py", "test_standing.py", "test_conversation.py", "test_block_copy.py"]
)
