"""One bench command from its configuration to its exit status: targets one after another, tables, records."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from pensieve.errors import ConfigError, HardwareMissing, PensieveError
from pensieve.lab.bench import TARGETS, Options
from pensieve.lab.bench.case import WIDTH, append, markdown, table
from pensieve.lab.bench.session import Bench, Record, command
from pensieve.lab.bench.timer import explain
from pensieve.lab.compose.machine import Device, cores, find_device
from pensieve.lab.compose.schema import HardwareConfig, TrackingConfig
from pensieve.lab.compose.settings import check_node
from pensieve.lab.trial.liveness import device_lock
from pensieve.lab.trial.terminal import say
from pensieve.lab.trial.tracking import Tracking, open_named
from pensieve.plugins.device.shelf import open_shelf

TRIALS = ("serve",)  # targets made of trials: each takes the device for itself, which may be simulated


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
    if options.only and "serve" in targets:  # a mistake leaves no record
        importlib.import_module("pensieve.lab.bench.serve").chosen_cells(machine, options)
    tracking = open_named(tracked)
    threads = _use_threads(hardware.threads, machine)
    records = Record(tracking.store, name, overrides, machine)
    limits: dict[str, float] = {}  # shared: what one target measured holds for the next
    benches, failures = [], []
    device = torch.device("cpu" if machine.simulated else machine.name)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # events and streams that name none are of this one
    try:
        with open_shelf():  # targets that run the same model load it once
            for target in targets:
                bench = Bench(
                    target, device, machine, hardware, options, records, tracking, say, threads, limits=limits
                )
                failure = _run(bench)
                failures += [f"{target}: {failure}"] if failure else []
                benches.append(bench)
                _show(bench)
    except BaseException as error:
        records.close("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
        raise
    failures += [gap for bench in benches for gap in bench.gaps]
    records.close("failed" if failures else "completed")
    if options.markdown:
        _write(options.markdown.expanduser(), machine, benches, limits, failures)
    _say_places(tracking, records, benches)
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
        module, function = TARGETS[bench.target]
        run = getattr(importlib.import_module(f"pensieve.lab.bench.{module}"), function)
        locked = nullcontext() if bench.target in TRIALS else device_lock(bench.machine, bench.options.exclusive, say)
        with locked:
            run(bench)
    except PensieveError as error:
        return str(error)
    except ModuleNotFoundError as error:
        if not error.name:  # a library that words it in its own way
            return explain(error)
        return f"the Python package {error.name} is not installed; install it and run again."
    except torch.OutOfMemoryError as error:
        return f"the device ran out of memory ({str(error).splitlines()[0]}); free it, or choose a smaller bench.model."
    except Exception as error:  # a fault of ours: shown whole, and the other targets still run
        traceback.print_exc()
        return f"it stopped ({explain(error)}); what it measured before is recorded."
    return None


def _show(bench: Bench) -> None:
    if bench.results:
        console = Console()
        width = min(console.width, WIDTH) if console.is_terminal else WIDTH
        Console(width=width).print(table(bench.target, bench.results))
    for sentence in bench.sentences:
        print(sentence, flush=True)


def _write(
    path: Path, machine: Device, benches: Sequence[Bench], limits: Mapping[str, float], failures: Sequence[str]
) -> None:
    results = {bench.target: bench.results for bench in benches if bench.results}
    sentences = [sentence for bench in benches for sentence in bench.sentences]
    append(path, markdown(command(), machine.label, limits, results, [*sentences, *failures]))


def _say_places(tracking: Tracking, records: Record, benches: Sequence[Bench]) -> None:
    if any(not bench.options.exclusive for bench in benches):
        print("Not alone on the device (bench.exclusive=false): these records are marked contended.")
    if not tracking.kept:
        print("Nothing was kept (tracking=off).")
        return
    print(f"Recorded as sweep {records.sweep_id}, {len(records.trials)} trials, in {tracking.store.database.shown}.")
