"""Engines that others wrote, run beside ours on the same sessions and the same weights: one file an engine."""

import pensieve.device  # noqa: F401 - how threads of OpenMP wait: the same in every engine
