"""What a start does that takes long, said before it."""

from __future__ import annotations

from collections.abc import Callable

from pensieve.lab.compose import TrialPlan, model_is_loaded
from pensieve.units import format_bytes

LARGE_BYTES = 2**30  # weights whose start takes long enough to wonder


def announce(plan: TrialPlan, say: Callable[[str], None]) -> None:
    """Say what the start of a real engine of ours will do, where somebody would wonder; not where its model is in memory."""
    if not model_is_loaded(plan) and (found := sentence(plan)):
        say(found)


def sentence(plan: TrialPlan) -> str | None:
    """None where the start is short, or none of ours."""
    device = plan.device
    if device.simulated or plan.config.baseline.engine is not None:
        return None
    if plan.model.weight_bytes < LARGE_BYTES and device.kind != "cuda":
        return None
    verb = "draws" if plan.config.model.weights == "random" else "loads"
    parts = [f"{verb} {format_bytes(plan.model.weight_bytes)} of weights"]
    if device.kind == "cuda":
        if plan.cpu_bytes:
            parts.append(f"page-locks {format_bytes(plan.cpu_bytes)} for the CPU tier")
        parts.append("compiles kernels, which are kept for later starts, and records graphs")
    return f"The start of {plan.model.name} on {device.label} {', '.join(parts)}."
