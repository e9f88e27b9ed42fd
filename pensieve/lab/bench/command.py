"""One bench command from its configuration to its exit status: targets one after another, tables, records."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pkgutil import resolve_name
from typing import Any

import torch
from rich.console import Console

from pensieve.errors import ConfigError, HardwareMissing, PensieveError
from pensieve.lab import tables
from pensieve.lab.bench import TARGETS, Options
from pensieve.lab.bench.case import table
from pensieve.lab.bench.session import Bench
from pensieve.lab.bench.timer import explain
from pensieve.lab.compose.machine import Device, cores, find_device
from pensieve.lab.compose.schema import HardwareConfig, TrackingConfig
from pensieve.lab.compose.settings import check_node
from pensieve.lab.trial.liveness import device_lock
from pensieve.lab.trial.terminal import say
from pensieve.lab.trial.tracking import open_named
from pensieve.plugins.device.shelf import open_shelf

TRIALS = ("serve",)  # targets made of trials: each takes the device for itself, which may be simulated
WIDTH = 100


def run_command(
    name: str, targets: Sequence[str], config: Mapping[str, Any], options: Options, overrides: Mapping[str, str]
) -> int:
    """See pensieve.lab.bench.run_target. A target that fails is one sentence; the others run, and the status is 1."""
    hardware, tracked = check_node(HardwareConfig, config, "hardware"), check_node(TrackingConfig, config, "tracking")
    machine = find_device(hardware)
    if machine.simulated and not set(targets) <= set(TRIALS):
        raise HardwareMissing(
            f"target={name} measures a real device, and hardware={hardware.name} is simulated; use hardware=local, "
            f"or target={' or '.join(TRIALS)}."
        )
    if machine.divided:
        raise ConfigError(
            f"hardware.gpus={machine.count}: benchmarks measure one device; use hardware.gpus=1, or run a trial "
            "(python runners/run.py)."
        )
    tracking, device = open_named(tracked), torch.device("cpu" if machine.simulated else machine.name)
    bench = Bench(machine, hardware, options, tracking, say, device, _use_threads(hardware.threads, machine))
    bench.open(name, overrides)
    if bench.on_gpu:
        torch.cuda.set_device(device)  # events and streams that name none are of this one
    failures = []
    try:
        with open_shelf():  # targets that run the same model load it once
            for target in targets:
                bench.target, bench.model = target, "none"
                if failure := _run(bench):
                    failures.append(f"{target}: {failure}")
                _show(bench)
    except BaseException as error:
        bench.close("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
        raise
    failures += bench.gaps
    bench.close("failed" if failures else "completed")
    for sentence in bench.sentences:
        print(sentence)
    if not options.exclusive:
        print("Not alone on the device (bench.exclusive=false): these records are marked contended.")
    kept = f"Recorded as sweep {bench.sweep_id}, {bench.trials} trials, in {tracking.store.database.shown}."
    print(kept if tracking.kept else "Nothing was kept (tracking=off).")
    for failure in failures:
        say(failure)
    return 1 if failures else 0


def _use_threads(asked: int | None, machine: Device) -> int | None:
    """Set torch's threads for CPU work. None: left alone, on a GPU where they hardly matter."""
    threads = asked or (cores() if machine.kind == "cpu" else None)
    if threads is not None:
        torch.set_num_threads(threads)
    return threads


def _run(bench: Bench) -> str | None:
    """Why the target could not be measured, or not to its end; None where it was."""
    try:
        run = resolve_name(f"pensieve.lab.bench.{TARGETS[bench.target]}")
        locked = nullcontext() if bench.target in TRIALS else device_lock(bench.machine, bench.options.exclusive, say)
        with locked:
            run(bench)
    except PensieveError as error:
        return str(error)
    except ModuleNotFoundError as error:
        return f"the Python package {error.name or error} is not installed; install it and run again."
    except torch.OutOfMemoryError as error:
        return f"the device ran out of memory ({str(error).splitlines()[0]}); free it, or choose a smaller bench.model."
    except Exception as error:  # a fault of ours: shown whole, and the other targets still run
        traceback.print_exc()
        return f"it stopped ({explain(error)}); what it measured before is recorded."
    return None


def _show(bench: Bench) -> None:
    if results := bench.results.get(bench.target):
        console = Console()
        console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
        console.print(tables.grid(table(results), f"bench {bench.target}", ("backend", "unit"), fold=True))
        for remark in (remark for result in results for remark in result.remarks):
            console.print(remark, markup=False, highlight=False)
