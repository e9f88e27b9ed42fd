"""What runners/bench.py can run, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pensieve.errors import ConfigError

ALL = ("kernel", "swap", "decode", "prefill", "serve")
RECORDED = (*ALL, "cpu_path")
"""Targets whose results are trials; each is the module of that name in this folder, with `run(bench)`."""

CHECKS = ("soak", "scan")


def run_target(config: Mapping[str, Any], overrides: Mapping[str, str]) -> int:
    """Run the target of conf/bench.yaml; exit status 0 where everything was measured beside its limit and its peer.

    config: the resolved configuration. overrides: what was typed, which names the command in the database. Raises
    PensieveError where nothing could be measured.
    """
    target = str(config["target"])
    if target == "soak":
        from pensieve.bench.soak import soak

        return soak(int(config["bench"]["turns"]), int(config["bench"]["seed"]))
    if target == "scan":
        from pensieve.bench.scan import main

        return main()
    if target != "all" and target not in RECORDED:
        raise ConfigError(f"There is no target {target!r}; choose all, {', '.join((*RECORDED, *CHECKS))}.")
    from pensieve.bench.command import run_command

    return run_command(target, ALL if target == "all" else (target,), config, overrides)
