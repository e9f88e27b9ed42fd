"""How a torch worker runs: plans in flight, graphs, the largest iteration it must have room for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pensieve.device.graphs import Recorder
from pensieve.device.kv_tensors import KvTensors
from pensieve.device.transfers.link import Link
from pensieve.device.transfers.transfer import Transfer


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """depth: plans in flight, 1 or 2. graphs: replay decode iterations where the device and the attention backend can.

    max_batch_tokens, max_batch_requests: of one iteration. memory_share: of the device's memory, what weights, KV and the
    largest iteration may take together where the KV's size is computed. recorder: what records a graph; torch.cuda's by
    default, and none on a CPU. transfer: what performs the copies; a DiskOptions where there is a file store, on a CPU with
    depth 1 only.
    """

    depth: int = 1
    graphs: bool = True
    max_batch_tokens: int = 512
    max_batch_requests: int = 64
    memory_share: float = 0.9
    recorder: Recorder | None = None
    transfer: Callable[[KvTensors, Link | None], Transfer] = Transfer
