"""Performs the copies of plans: whole blocks between the tiers, layer by layer; and the protocols of what moves them."""

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter_ns, sleep
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from pensieve.core.plan import CPU, GPU, Move, Moved, StepPlan
from pensieve.device.kv_tensors import KvTensors

_POLL_S = 5e-5


@dataclass(frozen=True, slots=True)
class BlockRun:
    """`blocks` consecutive blocks from `src` on, copied to as many from `dst` on."""

    src: int
    dst: int
    blocks: int


def merge_moves(moves: Sequence[Move]) -> list[BlockRun]:
    """Join blocks that are adjacent in source and target alike. Moves of one direction may be done in any order."""
    pairs = sorted(pair for move in moves for pair in zip(move.src, move.dst, strict=True))
    runs: list[BlockRun] = []
    for src, dst in pairs:
        last = runs[-1] if runs else None
        if last is not None and src == last.src + last.blocks and dst == last.dst + last.blocks:
            runs[-1] = BlockRun(last.src, last.dst, last.blocks + 1)
        else:
            runs.append(BlockRun(src, dst, 1))
    return runs


@dataclass(frozen=True, slots=True)
class Haul:
    """The same runs of every layer, from one pool [layers, blocks, ...] to another; both are contiguous."""

    runs: Sequence[BlockRun]
    source: torch.Tensor
    target: torch.Tensor

    @property
    def layers(self) -> int:
        return self.source.shape[0]

    @property
    def layer_block_bytes(self) -> int:
        return self.source.stride(1) * self.source.itemsize


def gpu_of(*pools: torch.Tensor) -> torch.device | None:
    """The device of the pool that is on a GPU; None where all are RAM."""
    return next((pool.device for pool in pools if pool.is_cuda), None)


class Mark(Protocol):
    """A point in a lane, reached when all that was enqueued before it is done."""

    def reached(self) -> bool: ...

    @property
    def error(self) -> BaseException | None:
        """The error of a copy before the mark that failed; known once the mark is reached."""
        ...


class Link(Protocol):
    """Two lanes, from CPU to GPU (inward) and back, and the compute that waits for marks in them."""

    def enqueue(self, haul: Haul, inward: bool, after: Sequence[Mark] = ()) -> list[Mark]:
        """Copy layer by layer once all of `after` are reached, and behind what was enqueued in this direction before.
        Returns at once, with a mark behind each layer."""
        ...

    def computed(self) -> Mark:
        """Return a mark that is reached when the compute launched so far is done."""
        ...

    def hold_compute(self, mark: Mark) -> None:
        """Compute launched from now on waits for the mark."""
        ...

    def stalled_ns(self) -> int:
        """How long compute waited since the last call, counting only waits that are over."""
        ...

    def synchronize(self) -> None:
        """Block the host until compute and both lanes are done."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Group:
    """Copies of one plan and direction, enqueued together. marks: one a layer."""

    number: int
    tickets: tuple[int, ...]
    marks: list[Mark]


class Transfer:
    """Performs the copies of plans, a layer at a time (sections 4.3.3 and 5 of the paper).

    The attention of layer i waits for layer i of those loads that bring a block its rows attend to, and for nothing else:
    so loading overlaps with compute, and a restore may compute leading chunks while later ones are still under way.
    Swap-outs wait for the loads before them unless urgent, since two directions at once slow each other by a fifth. A ticket
    is reported when its copy is done, which may be some plans later.

    link: what makes copies beside the compute. Without one both tiers are RAM, and a copy is done when the call returns.

    h2d_bytes and d2h_bytes count what was copied. below_load_s, below_kept: of a tier below, as in StartReport. Here there is
    none: a subclass performs its moves.
    """

    below_load_s = 0.0
    below_kept: Mapping[bytes, int] = {}

    def __init__(self, tensors: KvTensors, link: Link | None = None) -> None:
        self._tensors = tensors
        self._link = link
        self.h2d_bytes = 0
        self.d2h_bytes = 0
        self._loads: deque[_Group] = deque()  # oldest first
        self._outs: deque[_Group] = deque()
        self._numbers = 0
        self._brought_by = np.zeros(tensors.gpu_blocks + 1, dtype=np.int64)  # the last entry is that of no block
        self._required: _Group | None = None
        self.over: list[Moved] = []
        self._lost: dict[int, BaseException] = {}  # error by number of a group that failed and was not reported yet

    def begin(self, plan: StepPlan) -> int:
        """Start a plan's copies, those into the GPU first. Returns the nanoseconds for which the caller was held up."""
        inward = [move for move in plan.moves if move.source == CPU and move.target == GPU]
        return self.swap_in(inward) + self.swap_out([move for move in plan.moves if move.target == CPU])

    def swap_in(self, moves: Sequence[Move]) -> int:
        """CPU blocks to GPU blocks. Returns the nanoseconds for which the caller was held up (0 with a link).

        The next forward waits for all loads under way, unless `require` says which it needs.
        """
        runs = merge_moves(moves)
        self.h2d_bytes += self._count(runs)
        tickets = tuple(move.ticket for move in moves)
        if self._link is None:
            self.over += map(Moved, tickets)
            return _copy_now(runs, self._tensors.cpu, self._tensors.gpu)
        if moves:
            haul = Haul(runs, self._tensors.cpu, self._tensors.gpu)
            self._loads.append(self._group(tickets, self._link.enqueue(haul, inward=True)))
            for run in runs:
                self._brought_by[run.dst : run.dst + run.blocks] = self._numbers
        self._required = self._loads[-1] if self._loads else None
        return 0

    def require(self, blocks: NDArray[np.int64]) -> bool:
        """Let the next forward wait only for the loads that bring some of these GPU blocks (below 0: none). False where there
        are no such loads.

        Raises RuntimeError where one of them has failed already.
        """
        self._settle()
        self._required = None
        if not self._loads and not self._lost:
            return False
        numbers = set(np.unique(self._brought_by[blocks]).tolist())
        for number in numbers & self._lost.keys():
            cause = self._lost[number]
            raise RuntimeError(f"A copy between the tiers failed: {cause}") from cause
        # Loads follow each other in one lane, so waiting for the newest is waiting for all.
        self._required = next((group for group in reversed(self._loads) if group.number in numbers), None)
        return self._required is not None

    def wait_for_layer(self, layer: int) -> None:
        """Let the compute wait for this layer of the required loads, if any. Raises the error of a load that failed,
        where the link can tell."""
        if self._required is not None:
            assert self._link is not None
            self._link.hold_compute(self._required.marks[layer])

    def swap_out(self, moves: Sequence[Move]) -> int:
        """GPU blocks to CPU blocks, as the compute launched so far leaves them. Returns the nanoseconds for which the
        caller was held up (0 with a link)."""
        link, held_ns = self._link, 0
        for urgent in (True, False):
            chosen = [move for move in moves if move.urgent is urgent]
            if not chosen:
                continue
            runs, tickets = merge_moves(chosen), tuple(move.ticket for move in chosen)
            self.d2h_bytes += self._count(runs)
            if link is None:
                held_ns += _copy_now(runs, self._tensors.gpu, self._tensors.cpu)
                self.over += map(Moved, tickets)
                continue
            after = [link.computed()]
            if self._loads and not urgent:
                after.append(self._loads[-1].marks[-1])
            haul = Haul(runs, self._tensors.gpu, self._tensors.cpu)
            self._outs.append(self._group(tickets, link.enqueue(haul, False, after)))
        return held_ns

    def stalled_ns(self) -> int:
        """For how long compute waited for loads since the last call, as far as those waits are over."""
        return self._link.stalled_ns() if self._link is not None else 0

    def moved(self) -> tuple[Moved, ...]:
        """The moves that ended since the last call, whatever plan they came with."""
        self._settle()
        self._lost.clear()
        over, self.over = tuple(self.over), []
        return over

    def wait(self) -> bool:
        """Block the caller until a copy is done or has failed. False where none is under way or left to report."""
        while not self.over:
            if not self._loads and not self._outs:
                return False
            self._settle()
            if not self.over:
                sleep(_POLL_S)
        return True

    def abandon(self, tickets: Sequence[int]) -> None:
        """Wait for these copies and never report them: their plan failed."""
        with suppress(RuntimeError):  # a device in error for good: nothing is under way there
            self.finish()
        self._settle()
        self.over = [one for one in self.over if one.ticket not in tickets]

    def finish(self) -> None:
        """Wait until copies and compute are done; compute too, since a forward that failed halfway may have left kernels that
        still write to blocks."""
        if self._link is not None:
            self._link.synchronize()
            self._settle()
            assert not self._loads and not self._outs
            self._required = None

    def close(self) -> None:
        if self._link is not None:
            with suppress(RuntimeError):  # a device in error cannot be waited for; steps and copies reported the error
                self.finish()
                self._link.close()

    def _group(self, tickets: tuple[int, ...], marks: list[Mark]) -> _Group:
        self._numbers += 1
        return _Group(self._numbers, tickets, marks)

    def _settle(self) -> None:
        for groups in (self._loads, self._outs):
            while groups:
                try:
                    if not groups[0].marks[-1].reached():
                        break
                    error = groups[0].marks[-1].error
                except RuntimeError as failure:  # the device is in error for good: every query raises it
                    error = failure
                group = groups.popleft()
                self.over += [Moved(ticket, ok=error is None) for ticket in group.tickets]
                if error is not None:
                    self._lost[group.number] = error

    def _count(self, runs: list[BlockRun]) -> int:
        return sum(run.blocks for run in runs) * self._tensors.block_bytes


def _copy_now(runs: list[BlockRun], source: torch.Tensor, target: torch.Tensor) -> int:
    """Copy all layers of a run in one call. Returns the nanoseconds it took."""
    started = perf_counter_ns()
    for run in runs:
        target[:, run.dst : run.dst + run.blocks].copy_(source[:, run.src : run.src + run.blocks])
    return perf_counter_ns() - started if runs else 0
