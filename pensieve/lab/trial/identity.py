"""What makes two trials the same: the configuration, what `auto` comes to on this machine, and how the trial is run.

It is asked before every trial, so it must cost next to nothing where the trial is then reused: no torch is imported for a
CPU, and a server that somebody else started is asked three pages.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pensieve.errors import EngineMissing
from pensieve.lab.compose import TrialPlan, outside_engine
from pensieve.lab.compose.weights import weights_identity
from pensieve.lab.results.identity import RUNS_TRIALS, Identity, identify
from pensieve.plugins.engines.ray_cluster import ray_version


def identity_of(
    plan: TrialPlan, resolved: Mapping[str, Any], reproduces: int | None = None, entry: str = RUNS_TRIALS
) -> Identity:
    """What a completed trial must share with this one to be reused for it.

    reproduces: the trial that this one repeats; a repetition is never reused in its place. entry: the module that runs it.
    """
    weights = None if plan.device.simulated else weights_identity(plan.config.model)
    told = {"weights_content": weights, "reproduces": reproduces}
    marks = {**marks_of(plan), **{name: value for name, value in told.items() if value is not None}}
    return identify(resolved, plan.device.simulated, device_facts(plan), marks, entry)


def marks_of(plan: TrialPlan) -> dict[str, bool]:
    """The options of `trial` that change what it measures; the others only say how it is run."""
    return {"contended": True} if contended(plan) else {}


def contended(plan: TrialPlan) -> bool:
    """Whether other trials may run on the same device at the same time."""
    return not plan.config.trial.exclusive and not plan.device.simulated


def device_facts(plan: TrialPlan) -> dict[str, Any]:
    """The device and how it will be used, for results.identity.platform_of.

    attention: the backend expected to serve; the self-check at the start may fall back to another one, which the trial's
    column `engine` then names. copy_ahead: none without a CPU tier; what auto comes to follows from the device and the
    sizes. compiler: the C compiler of the native kernels. wait_policy: of OpenMP's threads on a CPU, as the environment
    says it.
    """
    device: dict[str, Any] = {"name": plan.device.label, "count": plan.device.count}
    if plan.device.simulated:
        return device
    if plan.config.baseline.engine is not None:
        return {**device, **_waiting(plan), **_outside_facts(plan)}
    from pensieve.device.asked import physical_cores
    from pensieve.device.kernels.backends import CAPTURING, expected
    from pensieve.lab.compose.plan import plans_in_flight

    hardware, kind = plan.config.hardware, plan.device.kind
    attention = expected(plan.config.attention_backend, kind, plan.chunk_tokens)
    recorded = hardware.graphs == "auto" and kind == "cuda" and attention in CAPTURING and not plan.device.divided
    return {
        **device,
        **({} if hardware.router == "single" else {"ray": ray_version()}),
        "threads": hardware.threads or physical_cores(),
        **_waiting(plan),
        "dtype": plan.model.dtype,
        "attention": attention,
        "compiler": _compiler() if attention == "native" else None,
        "graphs": "on" if recorded else "off",
        "copy_ahead": plan.config.scheduler.copy_ahead if plan.cpu_blocks else "none",
        "depth": plans_in_flight(plan.device, hardware.depth),
    }


def _waiting(plan: TrialPlan) -> dict[str, Any]:
    """How threads of OpenMP wait for each other in our engine and in all that this process starts."""
    import pensieve.device  # noqa: F401 - sets what is used where the environment names none

    policy = os.environ.get("OMP_WAIT_POLICY")
    return {"wait_policy": policy.upper()} if policy and plan.device.kind == "cpu" else {}


def _outside_facts(plan: TrialPlan) -> dict[str, Any]:
    from pensieve.device.asked import physical_cores

    said = dict(outside_engine(plan).identity())
    packages = said.pop("packages", "").split()
    return {
        "threads": plan.config.hardware.threads or physical_cores(),
        "dtype": plan.model.dtype,
        "packages": packages,
        **said,
    }


def _compiler() -> str | None:
    """Name the C compiler; None where attention_backend=native is given and none is found, which the start reports."""
    from pensieve.compiler import compiler_version, find_compiler

    try:
        return compiler_version(find_compiler()).replace(";", ",")
    except EngineMissing:
        return None
