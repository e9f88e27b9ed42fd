"""Engines that others wrote, run beside ours on the same sessions and the same weights: one file an engine."""
