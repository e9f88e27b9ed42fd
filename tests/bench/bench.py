"""A Bench on the CPU with a database of its own, for tests of targets."""

from pathlib import Path
from typing import Any

import torch

from pensieve.lab.bench.session import Bench, Options
from pensieve.lab.compose.plan import Device
from pensieve.lab.compose.settings import HardwareConfig
from pensieve.lab.results.store import open_store
from pensieve.lab.trial.job import Tracking

CPU = Device("cpu", "cpu", "cpu", "a processor", 1, 2**33, 2**33)


def make_bench(target: str, folder: Path, **options: Any) -> Bench:
    bench = Bench(
        machine=CPU,
        hardware=HardwareConfig(name="cpu", simulated=False, device="cpu", threads=1),
        options=Options(**{"repeats": 2, **options}),
        tracking=Tracking(folder, open_store(folder), mlflow=False, kept=True),
        say=lambda _: None,
        device=torch.device("cpu"),
        threads=1,
        target=target,
        limits={"copy_bytes_s": 1e9, "matrix_flops_s": 1e9},
    )
    bench.open(target, {"target": target})
    return bench
