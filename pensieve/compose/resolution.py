"""What the words auto and null of a configuration come to on this machine, found out before anything is loaded.

It is part of a trial's identity, so it must cost nothing where the trial is then reused: no torch is imported for a CPU.
"""

from __future__ import annotations

from typing import Any

from pensieve.compose.trial_plan import TrialPlan
from pensieve.errors import EngineMissing


def device_facts(plan: TrialPlan) -> dict[str, Any]:
    """The device and how it will be used, for results.identity.platform_of.

    attention: the backend that is expected to serve; the self-check at the start may turn to the next one, and the trial's
    `engine` says so. copies: none without a CPU tier over a link; auto is measured at the start. compiler: of the kernels
    that are compiled here.
    """
    device: dict[str, Any] = {"name": plan.device.label, "count": plan.device.count}
    if plan.device.simulated:
        return device
    from pensieve.worker.torch.kernels.availability import CAPTURING, expected
    from pensieve.worker.torch.threads import physical_cores

    hardware, kind = plan.config.hardware, plan.device.kind
    attention = expected(plan.config.attention_backend, kind, plan.model.dtype, plan.chunk_tokens)
    recorded = hardware.graphs == "auto" and kind == "cuda" and attention in CAPTURING
    return {
        **device,
        "threads": hardware.threads or physical_cores(),
        "dtype": plan.model.dtype,
        "attention": attention,
        "compiler": _compiler() if attention == "native" else None,
        "graphs": "on" if recorded else "off",
        "copies": hardware.copies if kind == "cuda" and plan.cpu_blocks else "none",
        "depth": hardware.depth,
    }


def _compiler() -> str | None:
    """None where native was asked for by name and there is none, which the start will say."""
    from pensieve.worker.torch.kernels.compiler import compiler_version, find_compiler

    try:
        return compiler_version(find_compiler()).replace(";", ",")
    except EngineMissing:
        return None
