"""Benchmarks beside their limits and peers: the targets of runners/bench.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pensieve.errors import ConfigError

TARGETS = {
    "kernel": ("kernel", "run"),
    "swap": ("swap", "run"),
    "decode": ("steps", "run_decode"),
    "prefill": ("steps", "run_prefill"),
    "serve": ("serve", "run"),
}
"""By name: the module in this folder, and its function of a Bench. `all` is all of them, in this order."""


def run_target(config: Mapping[str, Any], overrides: Mapping[str, str]) -> int:
    """Run the target of conf/bench.yaml; exit status 0 where everything was measured beside its limit and its peer.

    config: the resolved configuration. overrides: what was typed, which names the command in the database. Raises
    PensieveError where nothing could be measured.
    """
    target = str(config["target"])
    if target not in ("all", *TARGETS):
        raise ConfigError(f"There is no target {target!r}; choose all, {', '.join(TARGETS)}.")
    whole(config["bench"], "seed", 0)  # before torch is imported
    from pensieve.lab.bench.command import run_command

    return run_command(target, tuple(TARGETS) if target == "all" else (target,), config, overrides)


def whole(options: Mapping[str, Any], name: str, least: int) -> int:
    """The field bench.`name`. Raises ConfigError unless it is a whole number from `least` on."""
    value = options[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"bench.{name}={value!r} cannot be used; give a whole number from {least} on.")
    return value
