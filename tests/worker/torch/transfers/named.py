"""Small pools on the CPU, and a copier known by its name."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pensieve.core.plan import BlockRun
from pensieve.device.kv_tensors import KvTensors
from pensieve.device.transfers.link import Haul
from pensieve.plugins.device.thread_link import copy_runs, pieces_of
from tests.worker.torch.driver import tiny_spec

BLOCKS = 48
RUNS = [BlockRun(1, 9, 2), BlockRun(4, 0, 1), BlockRun(6, 2, 3), BlockRun(20, 30, 8)]


def tensors(blocks: int = BLOCKS) -> KvTensors:
    return KvTensors(tiny_spec("llama"), 4, blocks, blocks, torch.device("cpu"), torch.float32)


class Named:
    """Copies as `copy_runs` does, but for the faults it is given; known by its name."""

    def __init__(self, name: str, fault: Callable[[Haul], Haul] | None = None) -> None:
        self.name, self.fault = name, fault
        self.hauls: list[list[BlockRun]] = []

    def prepare(self, haul: Haul) -> Callable[[int], None]:
        self.hauls.append(list(haul.runs))
        done = haul if self.fault is None else self.fault(haul)
        return lambda layer: copy_runs(pieces_of(done)[layer])
