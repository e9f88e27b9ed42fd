"""How many agents one machine's memory carries: one engine for all of them, against an actor of Ray for each.

    python runners/bench.py target=density hardware=cpu hardware.cpu_memory=2GiB

Whole trials of workload=agents: the number of agents is doubled until some turn does not get the memory it needs, then
bisected. The limit is of processes, not of a ledger: hardware.cpu_memory on a CPU, the device's memory on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pensieve.errors import HardwareMissing, PensieveError, RequestFailed
from pensieve.lab.bench.case import Case, Figure, Measured
from pensieve.lab.bench.record import now
from pensieve.lab.bench.session import Bench
from pensieve.lab.compose import check, plan_trial
from pensieve.lab.trial.jobs import compose_job

OURS, PEER = "pensieve", "ray_keepalive"
MOST = 128
_TIMEOUT_S = 900.0
_AGENTS = {
    "reason_tokens": 192,
    "observation_tokens": 64,
    "reason_output": 50,
    "reflect_output": 50,
    "steps": 2,
    "act_s": 1.0,
}
_CONTEXT = 2 * (192 + 64 + 50 + 50)


@dataclass(frozen=True, slots=True)
class Density:
    """carried: the largest number that was carried, 0 for none. refused: the smallest that was not; None: all were, up to
    the largest that was tried."""

    carried: int
    refused: int | None

    @property
    def bound(self) -> str:
        return ">=" if self.refused is None else ""


def largest(carries: Callable[[int], bool], most: int) -> Density:
    """The largest number that is carried, from 1 to `most`, where whoever carries a number carries every smaller one."""
    carried, step = 0, 1
    while carried < most:
        step = min(step, most)
        if not carries(step):
            return _between(carries, carried, step)
        carried, step = step, 2 * step
    return Density(carried, None)


def _between(carries: Callable[[int], bool], carried: int, refused: int) -> Density:
    while refused - carried > 1:
        middle = (carried + refused) // 2
        if carries(middle):
            carried = middle
        else:
            refused = middle
    return Density(carried, refused)


def run(bench: Bench) -> None:
    """Target density. Raises HardwareMissing for a CPU without a limit, RequestFailed where a baseline fails otherwise."""
    if bench.machine.kind == "cpu" and bench.hardware.cpu_memory is None:
        raise HardwareMissing(
            "target=density fills the memory there is: set hardware.cpu_memory, such as 2GiB, to fill no more than that."
        )
    bench.model = bench.options.model or ("llama3_8b" if bench.on_gpu else "tiny")
    began = now()
    found: dict[str, Density] = {}
    errors: dict[str, str] = {}
    for name in (OURS, PEER):
        try:
            found[name] = largest(lambda agents, name=name: _carries(bench, name, agents), MOST)  # type: ignore[misc]
        except PensieveError as error:
            errors[name] = str(error)
    plan = plan_trial(check(_compose(bench, OURS, 1)))
    memory = plan.device.gpu_bytes
    each = _CONTEXT * plan.model.kv_bytes_per_token
    case = Case(
        label=f"agents of {_CONTEXT} tokens in {bench.hardware.cpu_memory or 'the memory of the device'}",
        floor=float((memory - plan.model.weight_bytes) // each),
        floor_is="memory less the weights, over the KV of an agent",
        metric="agents_carried",
        parameters={**_AGENTS, "memory_bytes": memory},
        ours=OURS,
        needs=(PEER,),
    )
    measured = []
    for name in (OURS, PEER):
        if name in errors:
            measured.append(Measured(name, error=errors[name]))
            continue
        one = found[name]
        figures = [Figure("refused_at", None if one.refused is None else float(one.refused))]
        figures.append(Figure("bound", None if one.bound else 1.0, shown=False, remark=one.bound))
        measured.append(Measured(name, (float(one.carried),), figures=figures))
    bench.record(case, measured, began)
    if len(found) == 2 and found[PEER].carried:
        ratio = found[OURS].carried / found[PEER].carried
        bench.note(
            f"{OURS} carries {found[OURS].bound}{found[OURS].carried} agents and {PEER} {found[PEER].bound}"
            f"{found[PEER].carried}: {found[OURS].bound}{ratio:.3g} times as many."
        )


def _carries(bench: Bench, baseline: str, agents: int) -> bool:
    """A whole trial in which every turn gets the memory it needs. Raises RequestFailed for one that fails otherwise."""
    outcome = bench.run_trial(_compose(bench, baseline, agents), f"agents={agents} {baseline}")
    if not outcome.completed:
        if "memory" in (outcome.error or "").lower():
            return False
        raise RequestFailed(outcome.error or "the trial did not complete")
    metrics = bench.tracking.store.metrics_of(outcome.trial_id)
    return next(one.value for one in metrics if one.name == "oom_turns") == 0


def _compose(bench: Bench, baseline: str, agents: int) -> Any:
    hardware = [f"hardware={bench.hardware.name}", f"hardware.device={bench.hardware.device}"]
    hardware += [f"hardware.threads={bench.threads}"] if bench.threads else []
    hardware += [f"hardware.cpu_memory={bench.hardware.cpu_memory}"] if bench.hardware.cpu_memory else []
    blocks = -(-_CONTEXT // 32) + 1
    return compose_job(
        "config",
        [
            *(f"model={bench.model}", "cache=demo", f"baseline={baseline}", *hardware, "workload=agents"),
            *(f"workload.{name}={value}" for name, value in _AGENTS.items()),
            f"workload.agents={agents}",
            f"cache.gpu='{32 * blocks * 8} tokens'",  # eight agents' KV at a time on the device, the others' behind it
            f"cache.cpu='{32 * blocks * MOST} tokens'",
            *("trial.isolate=false", f"trial.timeout_s={_TIMEOUT_S:g}", f"seed={bench.options.seed}"),
            f"trial.exclusive={str(bench.options.exclusive).lower()}",
            "experiment_name=bench",
        ],
    )
