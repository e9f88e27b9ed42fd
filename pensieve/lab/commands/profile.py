"""runners/profile.py: measure a machine once, for the retention value of its trials and for simulating it.

It is measured (pensieve/lab/trial/machine.py) in several processes one after the other, and the median counts, since where a
process's memory happens to lie makes up to a tenth of a decode on a CPU.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Collection, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from pensieve.lab.compose.build import check_free_memory, check_measurable
from pensieve.lab.compose.conf import outputs_folder, read_option
from pensieve.lab.compose.plan import plan_trial
from pensieve.lab.compose.settings import TrialConfig, check, check_node
from pensieve.lab.trial.job import device_lock
from pensieve.lab.trial.machine import SHORTEST_CONTEXT, measure_machine
from pensieve.lab.trial.terminal import say
from pensieve.plugins.device.shelf import open_shelf
from pensieve.sim.machine_profile import MachineProfile, middle_of

LATEST = "latest.json"


PROCESSES, ROUNDS, BUDGET_S = 3, 5, 120.0
"""How many processes measure, how often each cell is measured in each at most, and seconds of measured cells in all of them,
beyond which no further cell or round begins."""


class ProfileSettings(BaseModel):
    """The node `profile`. to: a file; None: profiles/<model>-<device>.json of the outputs, and latest.json."""

    model_config = ConfigDict(extra="forbid")

    to: str | None = None


def profile(config: Mapping[str, Any], _typed: Collection[str] = ()) -> int:
    """Measure, write, say where; returns the exit status."""
    settings = check_node(ProfileSettings, config, "profile")
    fields = {name: value for name, value in config.items() if name != "profile"}
    plan = plan_trial(_checked(fields))
    check_measurable(plan)
    spawn = multiprocessing.get_context("spawn")  # a fork would share threads, and where memory lies
    measured = []
    with device_lock(plan.device, plan.config.trial.exclusive, say):
        check_free_memory(plan)
        for place in range(1, PROCESSES + 1):
            with ProcessPoolExecutor(1, mp_context=spawn) as apart:
                measured.append(apart.submit(_measure, fields).result())
            say(f"measured in {place} of {PROCESSES} processes")
    found = middle_of(measured)
    folder = outputs_folder() / "profiles"
    name = "".join(letter if letter.isalnum() else "-" for letter in plan.device.label)
    paths = [folder / f"{plan.model.name}-{name}.json", folder / LATEST]
    for path in [Path(settings.to)] if settings.to is not None else paths:
        found.write(path)
    say(_summary(found))
    print(f"Profile:  {settings.to or paths[0]}")
    return 0


def _measure(fields: Mapping[str, Any]) -> MachineProfile:
    with open_shelf():  # the worker alone and the engine then read the same weights, where they lie
        return measure_machine(plan_trial(_checked(fields)), ROUNDS, BUDGET_S / PROCESSES)


def _checked(fields: Mapping[str, Any]) -> TrialConfig:
    return check({**fields, "workload": read_option("workload", "chat")})


def _summary(found: MachineProfile) -> str:
    busy = found.measured["others_cpu_share"]
    one, many = found.decode.at(1, SHORTEST_CONTEXT), found.decode.at(found.decode.rows[-1], SHORTEST_CONTEXT)
    text = (
        f"{found.where['model']} {found.where['dtype']} on {found.where['machine']}: a token of one request takes "
        f"{1e3 * one:.2f} ms, of {found.decode.rows[-1]} requests {1e3 * many:.2f} ms. The host takes "
        f"{1e3 * found.overhead_s:.2f} ms an iteration and {1e3 * found.prompt_s(128):.2f} ms a prompt. A block of "
        f"{found.costs.chunk_tokens} tokens takes {1e6 * found.h2d_block_s:.0f} us to load."
    )
    if busy > 0.1:
        text += f" Other programs used {busy:.0%} of this machine meanwhile: measure again when it is idle."
    return text
