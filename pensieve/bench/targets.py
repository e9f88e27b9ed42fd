"""What runners/bench.py can run, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pensieve.errors import ConfigError, EngineMissing

LATER = ("kernel", "swap", "decode", "prefill", "serve", "all")


def run_target(target: str, options: Mapping[str, Any]) -> int:
    """Exit status of a target. Raises ConfigError for an unknown one, EngineMissing for one that is not there yet."""
    if target == "soak":
        from pensieve.bench.soak import soak

        return soak(int(options["turns"]), int(options["seed"]))
    if target == "scan":
        from pensieve.bench.scan import main

        return main()
    if target in LATER:
        raise EngineMissing(
            f"target={target} cannot be run in this version yet; there are target=soak and target=scan."
        )
    raise ConfigError(f"There is no target {target!r}; choose soak or scan.")
