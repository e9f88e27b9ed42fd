"""Benchmarks beside their limits and peers, and checks of the server: the targets of runners/bench.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pensieve.errors import ConfigError

ALL = ("kernel", "swap", "decode", "prefill", "serve")
RECORDED = {
    "kernel": ("kernel", "run"),
    "swap": ("swap", "run"),
    "decode": ("steps", "run_decode"),
    "prefill": ("steps", "run_prefill"),
    "serve": ("serve", "run"),
}
"""Targets whose results are trials: the module in this folder, and its function of a Bench."""

CHECKS = ("wire", "steady", "overload")

_OF_ONE = {"sessions": ("steady", 1), "minutes": ("steady", 2)}
"""Fields of bench that one target alone has: its name, and the least value."""


def run_target(config: Mapping[str, Any], overrides: Mapping[str, str]) -> int:
    """Run the target of conf/bench.yaml; exit status 0 where everything was measured beside its limit and its peer.

    config: the resolved configuration. overrides: what was typed, which names the command in the database. Raises
    PensieveError where nothing could be measured.
    """
    target = str(config["target"])
    if target not in ("all", *RECORDED, *CHECKS):
        raise ConfigError(f"There is no target {target!r}; choose all, {', '.join((*RECORDED, *CHECKS))}.")
    given = config["bench"]
    seed = whole(given, "seed", 0)  # before torch is imported
    own = {name: whole(given, name, least) for name, (_, least) in _OF_ONE.items()}
    for name, (only, _) in _OF_ONE.items():
        if f"bench.{name}" in overrides and target != only:
            raise ConfigError(f"bench.{name} is a number of target={only}; target={target} has none.")
    if target == "wire":
        from pensieve.lab.bench.wire import ROUNDS, wire

        return wire(config, ROUNDS if given["repeats"] is None else whole(given, "repeats", 20), seed)
    if target == "steady":
        from pensieve.lab.bench.steady import steady

        return steady(config, own["sessions"], own["minutes"], seed)
    if target == "overload":
        from pensieve.lab.bench.overload import overload

        return overload(config, seed)
    from pensieve.lab.bench.command import run_command

    return run_command(target, ALL if target == "all" else (target,), config, overrides)


def whole(options: Mapping[str, Any], name: str, least: int) -> int:
    """The field bench.`name`. Raises ConfigError unless it is a whole number from `least` on."""
    value = options[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"bench.{name}={value!r} cannot be used; give a whole number from {least} on.")
    return value
