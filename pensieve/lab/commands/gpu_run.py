"""Ten minutes on a GPU: its tests, its benchmarks and one served cell, each under a time limit, in one file to send."""

from __future__ import annotations

import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path

from pensieve.errors import HardwareMissing, typed
from pensieve.lab.compose.conf import outputs_folder
from pensieve.lab.trial.terminal import say

_ROOM_FOR_8B = 22 * 2**30
_ASK_S = 60  # of a command that describes the machine


@dataclass(frozen=True, slots=True)
class Step:
    """command: what comes after the interpreter. limit_s: it is ended then, and the next one begins."""

    name: str
    command: tuple[str, ...]
    limit_s: float


def steps_for(gpu_bytes: int) -> tuple[Step, ...]:
    """Ten minutes at most. Weights are random, so that nothing is downloaded; the model is one that the device holds beside
    its KV."""
    model = "llama3_8b" if gpu_bytes >= _ROOM_FOR_8B else "opt_350m"
    of_model, short = f"bench.model={model}", "bench.repeats=3"
    return (
        Step("tests", ("-m", "pytest", "tests/gpu", "-q", "-rs", "-p", "no:cacheprovider"), 180),
        _bench("kernel", 90, short),
        _bench("swap", 60, short),
        _bench("decode", 100, of_model, short),
        _bench("prefill", 60, of_model, short),
        _bench("serve", 110, of_model, "bench.only=agents"),
    )


def _bench(target: str, limit_s: float, *asked: str) -> Step:
    return Step(target, ("runners/bench.py", f"target={target}", "hardware=cuda", *asked), limit_s)


def gpu_run(checkout: Path, steps: Sequence[Step] | None = None) -> int:
    """Run the steps and write one zip; 0 where every step passed. Raises HardwareMissing without a GPU, and where there is
    no checkout, whose tests and runners it needs."""
    if not (checkout / "tests" / "gpu").is_dir():
        raise HardwareMissing(
            "doctor --gpu runs tests/gpu and runners/bench.py; start it in a checkout: docs/first_gpu_run.md."
        )
    facts = environment(checkout)
    if not facts["gpu"]:
        raise HardwareMissing(
            f"doctor --gpu finds no CUDA device that this torch can use; {typed('doctor')} says what there is."
        )
    steps = steps_for(int(facts["gpu_bytes"])) if steps is None else steps
    total = sum(step.limit_s for step in steps) / 60
    say(f"{facts['gpu']}: {len(steps)} steps, at most {total:.0f} minutes; the first ones compile kernels.")
    folder = outputs_folder() / "gpu" / datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")
    folder.mkdir(parents=True)
    verdicts = [_perform(step, checkout, folder) for step in steps]
    (folder / "environment.json").write_text(json.dumps(facts, indent=1))
    (folder / "verdicts.json").write_text(json.dumps(verdicts, indent=1))
    bundle = folder.with_suffix(".zip")
    with zipfile.ZipFile(bundle, "w", zipfile.ZIP_DEFLATED) as packed:
        for file in sorted(folder.iterdir()):
            if file.suffix in (".json", ".log", ".db"):
                packed.write(file, file.name)
    passed = sum(one["verdict"] == "passed" for one in verdicts)
    say(f"{passed} of {len(verdicts)} steps passed. Everything is in {bundle}.")
    say("Attach that file to an issue of the project, whatever the verdicts; docs/first_gpu_run.md says what is in it.")
    return 0 if passed == len(verdicts) else 1


def _perform(step: Step, checkout: Path, folder: Path) -> dict[str, str | float]:
    """Run a step, whatever becomes of it: its verdict, and the last line that it wrote."""
    log = folder / f"{step.name}.log"
    say(f"{step.name} (at most {step.limit_s:.0f} s) ...")
    began, verdict = time.monotonic(), _verdict(step, checkout, log)
    seconds = round(time.monotonic() - began, 1)
    said = (log.read_text(errors="replace").strip().splitlines() or [""])[-1].strip()[:200]
    say(f"  {verdict} after {seconds:.0f} s: {said}")
    told = {"name": step.name, "command": shlex.join(("python", *step.command)), "verdict": verdict}
    return {**told, "seconds": seconds, "said": said, "log": log.name}


def _verdict(step: Step, checkout: Path, log: Path) -> str:
    variables = {**os.environ, "PENSIEVE_OUTPUTS": str(log.parent), "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *step.command], cwd=checkout, env=variables, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            return "passed" if process.wait(step.limit_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            return "out of time"
        finally:  # with all it has started: a worker that holds the device would spoil the next step
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def environment(checkout: Path) -> dict[str, str]:
    """What a reader of the numbers needs. gpu: "" where torch can use none."""
    return {
        "gpu": _of_device("name"),
        "gpu_bytes": _of_device("total_memory"),
        "nvidia_smi": _said(["nvidia-smi"]),
        "commit": _said(["git", "-C", str(checkout), "describe", "--always", "--dirty"]),
        "python": sys.version,
        "platform": platform.platform(),
        "cpus": str(os.cpu_count()),
        "packages": "\n".join(sorted(f"{found.name}=={found.version}" for found in distributions())),
    }


def _of_device(field: str) -> str:
    return _said([sys.executable, "-c", f"import torch; print(torch.cuda.get_device_properties(0).{field})"])


def _said(command: Sequence[str]) -> str:
    """Return the output of a command; "" where it fails or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
