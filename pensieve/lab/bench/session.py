"""One bench command: the device and its limits, the targets one after another, and the record: one sweep, with one trial for
each backend of each case."""

import shlex
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pkgutil import resolve_name
from typing import Annotated, Any

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from rich.console import Console

from pensieve.device.shelf import open_shelf
from pensieve.errors import ConfigError, HardwareMissing, PensieveError
from pensieve.lab.bench.case import Case, Measured, explain, interleaved, table
from pensieve.lab.compose.conf import read_option
from pensieve.lab.compose.plan import Device, find_device
from pensieve.lab.compose.settings import HardwareConfig, TrackingConfig, check_node, resolved
from pensieve.lab.metrics import MetricValue, is_known
from pensieve.lab.results.environment import cores, environment, git_commit, gpus, host
from pensieve.lab.results.identity import identify, sweep_key
from pensieve.lab.results.schema import BENCH
from pensieve.lab.trial.job import Job, Outcome, Tracking, device_lock, open_tracking
from pensieve.lab.trial.run import run_trial
from pensieve.lab.trial.terminal import say
from pensieve.units import grid

TARGETS = {
    "kernel": "kernel:run",
    "swap": "swap:run",
    "decode": "steps:run_decode",
    "prefill": "steps:run_prefill",
    "serve": "serve:run",
}
"""By name: a function of a Bench in this folder. `all` is all of them, in this order."""
REPETITIONS = "repetitions"
TRIALS = ("serve",)  # targets made of trials: each takes the device for itself, which may be simulated
WIDTH = 100
# Of what measures the limits.
_COPY_BYTES = {"cuda": 2 * 2**30, "cpu": 64 * 2**20}  # beyond any cache, and short
_SQUARE = {"cuda": 8192, "cpu": 1024}
_ROUNDS = 7


class Options(BaseModel):
    """The fields of `bench` in conf/bench.yaml. None: the target's own choice."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    repeats: Annotated[int, Field(ge=1)] | None = None
    model: Annotated[str | None, BeforeValidator(lambda name: None if name == "auto" else name)] = None


@dataclass
class Bench:
    """What a target is given: the device, the options, `run_trial`, and `record`, by which each case reaches table and
    database.

    target: the one that runs; model: what it runs, "none" where it runs none. device: torch's. threads: for CPU operations;
    None on a GPU, for torch's own choice. limits: rates by name. results: by target. sentences: stand below the tables.
    began: when measuring the next case did.
    """

    machine: Device
    hardware: HardwareConfig
    options: Options
    tracking: Tracking
    say: Callable[[str], None]
    device: torch.device
    threads: int | None
    sweep_id: int = 0
    target: str = ""
    model: str = "none"
    trials: int = 0
    results: dict[str, list[Case]] = field(default_factory=dict)
    sentences: list[str] = field(default_factory=list)
    limits: dict[str, float] = field(default_factory=dict)
    began: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def on_gpu(self) -> bool:
        return bool(self.device.type == "cuda")

    @property
    def dtype(self) -> torch.dtype:
        """What models run in on this device."""
        return torch.bfloat16 if self.on_gpu else torch.float32

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def copy_bytes_s(self) -> float:
        """Bytes a second, read plus written, of a plain copy within device memory: the best of this command."""
        return self.limits["copy_bytes_s"]

    @property
    def matrix_flops_s(self) -> float:
        """Operations a second (multiplies and adds) of a large square product in `dtype`: the best of this command."""
        return self.limits["matrix_flops_s"]

    def measure_limits(self) -> None:
        """Measure both rates (again) and keep the best: a limit measured at a busy moment would flatter ours."""
        size, n = _COPY_BYTES[self.device.type], _SQUARE[self.device.type]
        source = torch.ones(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        a, b, out = (torch.randn(n, n, dtype=self.dtype, device=self.device) for _ in range(3))
        runs: dict[str, Callable[[], object]] = {
            "copy_bytes_s": lambda: target.copy_(source),
            "matrix_flops_s": lambda: torch.mm(a, b, out=out),
        }
        with torch.inference_mode():
            times = interleaved(runs, _ROUNDS, self.device, at_least_ms=20.0)
        for name, work in {"copy_bytes_s": 2 * size, "matrix_flops_s": 2 * n**3}.items():
            assert times[name].error is None, times[name].error
            self.limits[name] = max(work / min(times[name].values) * 1e3, self.limits.get(name, 0.0))

    def open(self, name: str, overrides: Mapping[str, str]) -> None:
        """Begin the sweep of the command. overrides: what was typed."""
        typed = [f"{key}={value}" for key, value in overrides.items()]
        self.sweep_id = self.tracking.store.open_sweep(
            key=sweep_key(["bench", f"device={self.machine.identity}", *typed], {}), name=f"bench_{name}", experiment=BENCH,
            command=shlex.join(["python", *sys.argv]), overrides=overrides, n_expected=0, host=host(),
            git_commit=git_commit(),
        )  # fmt: skip

    def close(self, status: str) -> None:
        """status: completed, failed or interrupted."""
        self.tracking.store.set_sweep(self.sweep_id, status=status, n_expected=self.trials)

    def record(self, case: Case, measured: Sequence[Measured]) -> None:
        """Every backend of a case becomes a trial; one that failed becomes a failed trial with its error."""
        store = self.tracking.store
        for one in measured:
            trial_id = store.begin_trial(self._columns(case, one))
            self._link(trial_id)
            store.add_metrics(trial_id, _metrics(case, one))
            status, flags = "completed" if one.values else "failed", {"bench": True, "floor_is": case.floor_is}
            store.finish_trial(trial_id, status, error=one.error, started_at=self.began, flags=flags)
        self.results.setdefault(self.target, []).append(replace(case, measured=measured))
        self.began = datetime.now(UTC)

    def run_trial(self, cfg: Any, title: str) -> Outcome:
        """Run a composed configuration, recorded like any trial and as part of the command; its error is in the outcome."""
        folder = self.tracking.outputs / "runs" / "bench" / f"{self.sweep_id}-{self.trials}"
        job = Job(title, folder, resolved(cfg), self.sweep_id, self.trials)
        outcome = run_trial(job, self.tracking)
        if outcome.trial_id:
            self._link(outcome.trial_id)
        return outcome

    def _link(self, trial_id: int) -> None:
        self.tracking.store.link(self.sweep_id, trial_id, self.trials, reused=False)
        self.trials += 1

    def note(self, sentence: str) -> None:
        """A sentence that stands below the tables, once."""
        if sentence not in self.sentences:
            self.sentences.append(sentence)

    @property
    def gaps(self) -> list[str]:
        """Why the command must not exit with 0, a sentence each."""
        return [f"{target} {gap}" for target, results in self.results.items() for one in results for gap in one.gaps]

    def _columns(self, case: Case, measured: Measured) -> dict[str, Any]:
        """A trial is identified by case and device, without repetitions and output paths: again it is the same one."""
        machine, workload = self.machine, f"bench_{self.target}"
        config = {
            "bench": {"target": self.target, "case": case.label, "metric": case.metric, **case.parameters},
            "model": {"name": self.model, "dtype": self.dtype_name},
            "hardware": {"name": self.hardware.name, "threads": self.threads},
            "baseline": {"name": measured.backend},
            "workload": {"name": workload},
            "seed": 0,
        }
        device = {"name": machine.label, "count": machine.count, "threads": self.threads}
        identity = identify(config, machine.simulated, device)
        return {
            **{name: getattr(identity, name) for name in ("fingerprint", "config_hash", "code_hash", "platform")},
            "experiment": BENCH,
            "model": self.model,
            "baseline": measured.backend,
            "workload": workload,
            "hardware": self.hardware.name,
            "seed": 0,
            "weights": "none" if self.model == "none" else "random",
            "dtype": self.dtype_name,
            "device": machine.label,
            "device_count": machine.count,
            "simulated": machine.simulated,
            "contended": False,
            "git_commit": git_commit(),
            "config": config,
            "environment": environment(),
            "engine": {
                "backend": measured.backend,
                "version": measured.version,
                "threads": self.threads,
                "values": list(measured.values),
                **measured.engine,
                "limits": dict(self.limits),  # that the case's floor was computed from
                "runtime": {"gpus": gpus(), "torch": torch.__version__, "cuda": torch.version.cuda},  # clocks of now
            },
        }


def _metrics(case: Case, measured: Measured) -> list[MetricValue]:
    assert all(map(is_known, measured.figures)), measured.figures
    found = [MetricValue(name, value, case.label) for name, value in measured.figures.items()]
    if not measured.values:
        return found
    low, high = measured.interval or (None, None)
    n = len(measured.values)
    main = MetricValue(case.metric, measured.value, case.label, n, REPETITIONS, low, high, limit_value=case.floor)
    return [main, *found]


# The command


def run_target(config: Mapping[str, Any], overrides: Mapping[str, str]) -> int:
    """Run the target of conf/bench.yaml; exit status 0 where everything was measured beside its limit and its peer. A target
    that fails is one sentence; the others run, and the status is 1.

    config: the resolved configuration. overrides: what was typed, which names the command in the database. Raises
    PensieveError where nothing could be measured.
    """
    name = str(config["target"])
    if name not in ("all", *TARGETS):
        raise ConfigError(f"There is no target {name!r}; choose all, {', '.join(TARGETS)}.")
    targets, options = tuple(TARGETS) if name == "all" else (name,), check_node(Options, config, "bench")
    if options.model is not None:
        read_option("model", options.model)  # refuses an unknown one, also where the target runs none
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
    tracking, device = open_tracking(tracked), torch.device("cpu" if machine.simulated else machine.name)
    threads = hardware.threads or (cores() if machine.kind == "cpu" else None)
    if threads is not None:
        torch.set_num_threads(threads)
    bench = Bench(machine, hardware, options, tracking, say, device, threads)
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
    kept = f"Recorded as sweep {bench.sweep_id}, {bench.trials} trials, in {tracking.store.database.shown}."
    print(kept if tracking.kept else "Nothing was kept (tracking=off).")
    for failure in failures:
        say(failure)
    return 1 if failures else 0


def _run(bench: Bench) -> str | None:
    """Why the target could not be measured, or not to its end; None where it was."""
    try:
        run = resolve_name(f"pensieve.lab.bench.{TARGETS[bench.target]}")
        locked = nullcontext() if bench.target in TRIALS else device_lock(bench.machine, True)
        with locked:
            run(bench)
    except PensieveError as error:
        return str(error)
    except ModuleNotFoundError as error:
        return f"the Python package {error.name or error} is not installed; install it and run again."
    except Exception as error:  # a fault of ours: shown whole, and the other targets still run
        traceback.print_exc()
        return f"it stopped ({explain(error)}); what it measured before is recorded."
    return None


def _show(bench: Bench) -> None:
    if results := bench.results.get(bench.target):
        console = Console()
        console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
        console.print(grid(table(results), f"bench {bench.target}", ("backend", "unit"), fold=True))
        for remark in (remark for case in results for remark in case.remarks):
            console.print(remark, markup=False, highlight=False)
