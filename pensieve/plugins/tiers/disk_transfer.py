"""Copies between the tiers with a file store below them: a thread writes what leaves, and reads what returns, in the order of
the plans.

TorchOptions.transfer names it; nothing else of the worker knows of a disk.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter_ns

import numpy as np
import torch
from numpy.typing import NDArray

from pensieve.core.plan import GPU, Move, Moved, StepPlan
from pensieve.device.kv_tensors import KvTensors
from pensieve.device.transfers.transfer import Link, Transfer
from pensieve.plugins.tiers.pool_file import PoolFile
from pensieve.sim.worker import STAGING_BYTES

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Write:
    """A chunk of a store: to block dst of the file."""

    ticket: int
    key: bytes
    dst: int
    staged: torch.Tensor  # [layers, chunk_tokens, 2, kv_heads, head_dim]


@dataclass(slots=True, eq=False)
class _Read:
    """marks: one a layer, set when it has come, or something else has."""

    load: Move
    marks: list[threading.Event]
    wrong: set[int] = field(default_factory=set)  # which of its chunks are not what was asked for

    @property
    def outcome(self) -> Moved:
        gone = tuple(self.load.keys[place] for place in sorted(self.wrong))
        return Moved(self.load.ticket, not gone, gone)


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """The file store, see PoolFile: where it is, None for a file that ends with the process, in `folder` then; what names the
    KV in it; how many chunks it holds."""

    path: Path | None
    folder: Path
    identity: bytes
    blocks: int

    def __call__(self, tensors: KvTensors, link: Link | None) -> DiskTransfer:
        """Raises HardwareMissing where there is no room for the file."""
        file = PoolFile(self.path, self.folder, self.identity, self.blocks, tensors.layers, tensors.layer_block_bytes)
        return DiskTransfer(tensors, link, file)


class DiskTransfer(Transfer):
    """Performs moves from and to the file beside the compute, one at a time. Reads go first, for which somebody
    waits, but for writes to their blocks that were ordered before: so a block of the file may be given to another chunk while
    it is still to be read, and a chunk be asked for while it is still to be written.

    What is to be written is copied in memory first, since its block is used again at once; where more than `staging_bytes`
    wait, it is not written. What is read is checked layer by layer; a layer that is not what was written is zeroed, the load
    has failed and the chunk is gone. The attention of a layer waits for that layer of the loads
    that bring blocks of its rows, as for swap-ins. GPU blocks must be in RAM.
    """

    def __init__(
        self, tensors: KvTensors, link: Link | None, file: PoolFile, staging_bytes: int = STAGING_BYTES
    ) -> None:
        assert tensors.device.type == "cpu"
        super().__init__(tensors, link)
        self.below_load_s, self.below_kept = file.measure_s(), file.kept
        self._file, self._staging_bytes = file, staging_bytes
        self._staged_bytes = 0
        self._changed = threading.Condition()
        self._orders: list[_Write | _Read] = []
        self._closing = False
        self._reads: list[_Read] = []  # under way, oldest first
        self._required_read: _Read | None = None
        self._stored: SimpleQueue[Moved] = SimpleQueue()
        self._waited_ns = 0
        self._thread = threading.Thread(target=self._run, name="pensieve-disk", daemon=True)
        self._thread.start()

    # -- the engine's side --------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> int:
        """Returns when the blocks that are to be written may be used again: they are read before anything is copied."""
        for move in plan.moves:
            if not move.keys:
                continue
            if move.target != GPU:
                self._store(move)
                continue
            read = _Read(move, [threading.Event() for _ in range(self._tensors.layers)])
            self._reads.append(read)
            self._order(read)
        return super().begin(plan)

    def _store(self, move: Move) -> None:
        """Stage its chunks, and tell at once which find no room: a read of those is not ordered in vain."""
        pool = self._tensors.gpu if move.source == GPU else self._tensors.cpu
        gone = []
        for key, src, dst in zip(move.keys, move.src, move.dst, strict=True):
            if self._staged_bytes + self._tensors.block_bytes > self._staging_bytes:
                gone.append(key)
            else:
                self._order(_Write(move.ticket, key, dst, pool[:, src].clone()), self._tensors.block_bytes)
        self._stored.put(Moved(move.ticket, not gone, tuple(gone)))

    def _order(self, order: _Write | _Read, staged_bytes: int = 0) -> None:
        with self._changed:
            self._staged_bytes += staged_bytes
            self._orders.append(order)
            self._changed.notify()

    def require(self, blocks: NDArray[np.int64]) -> bool:
        waits, self._required_read = super().require(blocks), None
        if self._reads:
            needed = (read for read in reversed(self._reads) if np.isin(read.load.dst, blocks).any())
            self._required_read = next(needed, None)  # who waits for the newest waits for all
        return waits or self._required_read is not None

    def wait_for_layer(self, layer: int) -> None:
        super().wait_for_layer(layer)
        if self._required_read is not None and not self._required_read.marks[layer].is_set():
            began = perf_counter_ns()
            self._required_read.marks[layer].wait()
            self._waited_ns += perf_counter_ns() - began

    def stalled_ns(self) -> int:
        waited, self._waited_ns = self._waited_ns, 0
        return super().stalled_ns() + waited

    def moved(self) -> tuple[Moved, ...]:
        over = [read for read in self._reads if read.marks[-1].is_set()]
        self._reads = [read for read in self._reads if read not in over]
        stored = [self._stored.get() for _ in range(self._stored.qsize())]
        return (*super().moved(), *stored, *(read.outcome for read in over))

    def wait(self) -> bool:
        if super().wait():
            return True
        if not self._reads:
            return False
        self._reads[0].marks[-1].wait()
        return True

    def abandon(self, tickets: Sequence[int]) -> None:
        super().abandon(tickets)
        for read in [read for read in self._reads if read.load.ticket in tickets]:
            read.marks[-1].wait()
            self._reads.remove(read)

    def close(self) -> None:
        """Write what is still to be written, and close the file."""
        super().close()
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self._file.close()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Until the transfer is closed and all is written."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._orders or self._closing)
                if not self._orders:
                    return
                read = next((one for one in self._orders if isinstance(one, _Read)), None)
                order = self._orders[0] if read is None else next(one for one in self._orders if self._goes(one, read))
                self._orders.remove(order)
            if isinstance(order, _Read):
                self._read(order)
            else:
                self._write(order)

    def _goes(self, order: _Write | _Read, read: _Read) -> bool:
        return order is read or (isinstance(order, _Write) and order.dst in read.load.src)

    def _write(self, order: _Write) -> None:
        layers = [_bytes_of(layer) for layer in order.staged]
        try:
            self._file.write(order.dst, order.key, layers)
        except OSError as error:
            log.error("A chunk cannot be written to the file of cache.disk: %s", error)
            self._stored.put(Moved(order.ticket, ok=False, gone=(order.key,)))
        with self._changed:
            self._staged_bytes -= self._tensors.block_bytes

    def _read(self, order: _Read) -> None:
        load, wrong = order.load, order.wrong
        sums = [self._file.checksums(src, key) for src, key in zip(load.src, load.keys, strict=True)]
        for layer, mark in enumerate(order.marks):
            for place, (src, dst) in enumerate(zip(load.src, load.dst, strict=True)):
                told, into = sums[place], self._tensors.gpu[layer, dst]
                whole = told is not None and self._file.read_layer(src, layer, _bytes_of(into), told[layer])
                if not whole or place in wrong:
                    wrong.add(place)
                    into.zero_()
            if wrong and layer == len(order.marks) - 1:  # whoever sees the last mark sees what was wrong
                log.warning(
                    "%s of %s chunks on disk are not what was written; they are computed again.", len(wrong), len(sums)
                )
            mark.set()


def _bytes_of(layer: torch.Tensor) -> memoryview:
    """Return the layer's own memory as bytes."""
    return memoryview(layer.reshape(-1).view(torch.uint8).numpy())
