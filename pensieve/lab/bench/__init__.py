"""Benchmarks beside their limits and peers: the targets of runners/bench.py."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from pensieve.errors import ConfigError
from pensieve.lab.compose.conf import read_option
from pensieve.lab.compose.settings import check_node

TARGETS = {
    "kernel": "kernel:run",
    "swap": "swap:run",
    "decode": "steps:run_decode",
    "prefill": "steps:run_prefill",
    "serve": "serve:run",
}
"""By name: a function of a Bench in this folder. `all` is all of them, in this order."""


class Options(BaseModel):
    """The fields of `bench` in conf/bench.yaml. None: the target's own choice."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    repeats: Annotated[int, Field(ge=1)] | None = None
    model: Annotated[str | None, BeforeValidator(lambda name: None if name == "auto" else name)] = None


def run_target(config: Mapping[str, Any], overrides: Mapping[str, str]) -> int:
    """Run the target of conf/bench.yaml; exit status 0 where everything was measured beside its limit and its peer.

    config: the resolved configuration. overrides: what was typed, which names the command in the database. Raises
    PensieveError where nothing could be measured.
    """
    target = str(config["target"])
    if target not in ("all", *TARGETS):
        raise ConfigError(f"There is no target {target!r}; choose all, {', '.join(TARGETS)}.")
    options = check_node(Options, config, "bench")  # before torch is imported
    if options.model is not None:
        read_option("model", options.model)  # refuses an unknown one, also where the target runs none
    from pensieve.lab.bench.session import run_command

    return run_command(target, tuple(TARGETS) if target == "all" else (target,), config, options, overrides)
