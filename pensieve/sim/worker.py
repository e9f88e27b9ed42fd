"""A worker that computes nothing and takes the time a cost model says, on a virtual clock; and which cost model a machine
has. Imports no torch."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pensieve.core.machine import CostModel
from pensieve.core.plan import (
    CPU,
    GPU,
    NO_DECODES,
    Decodes,
    Move,
    Moved,
    Repeats,
    Row,
    Sample,
    StartReport,
    StepPlan,
    StepResult,
)
from pensieve.core.request import TokenArray
from pensieve.sim.machine_profile import ProfiledCost, read_profile
from pensieve.sim.measured import MeasuredCost
from pensieve.sim.roofline import Roofline, Run
from pensieve.specs import HardwareSpec, ModelSpec

_MASK = (1 << 64) - 1
STAGING_BYTES = 256 * 2**20
"""What may wait in memory to be written to a tier below; a chunk that finds it full is not written: no step waits for it."""

_FEW = 12  # tokens that are drawn sooner one by one


class SimulatedCost(CostModel, Protocol):
    """Whole iterations and copies, beside the chunks that a cost model prices."""

    def iteration_s(self, runs: Iterable[Run], sampled: int, decodes: Decodes = NO_DECODES) -> float:
        """One iteration over attention rows of queries [start, stop) each, and decodes beside them; logits of `sampled`
        positions."""
        ...

    def following_s(self, runs: Sequence[Run], sampled: int, decodes: Decodes, most: int) -> NDArray[np.float64] | None:
        """So many iterations that follow one of these rows, each of which goes on by as many positions as it has. None: each
        has to be asked for by itself."""
        ...

    def ran(self, iterations: int) -> None:
        """So many of those that were told at once have run."""
        ...

    def transfer_s(self, blocks: int, to_gpu: bool, runs: int = 1) -> float:
        """Blocks over the link between CPU and GPU, in so many runs of blocks that are neighbours in both."""
        ...

    def extrapolated(self) -> dict[str, Any]:
        """What was asked beyond what was measured, by term; empty: nothing."""
        ...


def simulated_cost(model: ModelSpec, hardware: HardwareSpec, chunk_tokens: int) -> SimulatedCost:
    """By a profile of the whole machine, or tables of measured kernels, where it has either; else by its roofline."""
    if hardware.profile is not None:
        return ProfiledCost(read_profile(hardware.profile), model, hardware, chunk_tokens)
    if hardware.terms.get("projections", "roofline") == "roofline":
        return Roofline(model, hardware, chunk_tokens)
    return MeasuredCost(model, hardware, chunk_tokens)


class VirtualClock:
    """A counter that only a simulated worker or an idle engine moves.

    Integer nanoseconds, so that summing many short steps gives the same time as one long one.
    """

    virtual = True

    def __init__(self) -> None:
        self._now_ns = 0
        self.on_advance: Callable[[int], None] | None = None
        """Called with the new time just before the clock moves there: nothing changes in between."""

    def now_ns(self) -> int:
        return self._now_ns

    def now_s(self) -> float:
        return self._now_ns / 1e9

    def advance_to(self, ns: int) -> None:
        """Move forward to `ns`; an earlier time leaves the clock where it is."""
        if ns > self._now_ns:
            if self.on_advance is not None:
                self.on_advance(ns)
            self._now_ns = ns


@dataclass(slots=True)
class UnderWay:
    """Copies that end together. count: their blocks. blocks: those that loads fill on the GPU, layer after layer."""

    tickets: tuple[int, ...]
    begins_ns: int
    ends_ns: int
    count: int
    blocks: frozenset[int] = frozenset()


@dataclass(slots=True)
class _Queued:
    """earliest_ns: not before that. left_ns: what it would still take alone."""

    copies: UnderWay
    earliest_ns: int
    left_ns: float


Way = deque[UnderWay]
"""The oldest first, each after the one before it."""


class DuplexLink:
    """Copies to the GPU (`inward`) and to the CPU (`outward`), each way one after the other. While both ways are busy each
    loses `penalty` of its rate, whichever plans the copies are of; so a copy that begins moves the ends of those under way.
    """

    def __init__(self, penalty: float) -> None:
        self.inward: Way = deque()
        self.outward: Way = deque()
        self._inward: deque[_Queued] = deque()  # not done yet, as of _at_ns
        self._outward: deque[_Queued] = deque()
        self._ways = [self._inward, self._outward]
        self._at_ns = 0.0
        self._rate = 1 - penalty

    def inward_free_ns(self, now_ns: int) -> int:
        return max(now_ns, self._inward[-1].copies.ends_ns) if self._inward else now_ns

    def outward_free_ns(self, now_ns: int) -> int:
        return max(now_ns, self._outward[-1].copies.ends_ns) if self._outward else now_ns

    def copy_in(self, tickets: tuple[int, ...], blocks: frozenset[int], work_ns: int, now_ns: int) -> UnderWay:
        """Behind all that goes the same way: it takes work_ns if nothing goes the other way meanwhile."""
        self._go_on(now_ns)
        begins = self.inward_free_ns(now_ns)
        copies = UnderWay(tickets, begins, begins + work_ns, len(blocks), blocks)
        self.inward.append(copies)
        self._inward.append(_Queued(copies, begins, work_ns))
        self._share(self._outward, begins)
        return copies

    def copy_out(self, tickets: tuple[int, ...], count: int, work_ns: int, now_ns: int, after_loads: bool) -> UnderWay:
        """As copy_in. after_loads: not before all that was to go in by now is there."""
        self._go_on(now_ns)
        earliest = self.inward_free_ns(now_ns) if after_loads else now_ns
        begins = max(self.outward_free_ns(now_ns), earliest)
        copies = UnderWay(tickets, begins, begins + work_ns, count)
        self.outward.append(copies)
        self._outward.append(_Queued(copies, earliest, work_ns))
        self._share(self._inward, begins)
        return copies

    def _share(self, other: deque[_Queued], begins_ns: int) -> None:
        """Say anew when all copies end, where one that begins at begins_ns meets others that go the other way."""
        if self._rate < 1 and other and other[-1].copies.ends_ns > begins_ns:
            ways = [deque(_Queued(one.copies, one.earliest_ns, one.left_ns) for one in way) for way in self._ways]
            for copies, at_ns in self._through(ways, math.inf):
                if copies.ends_ns > self._at_ns:  # else it was told to be done, but for a part of a nanosecond
                    copies.ends_ns = round(at_ns)
            for way in self._ways:
                for before, one in pairwise(way):
                    one.copies.begins_ns = max(one.earliest_ns, before.copies.ends_ns)

    def _go_on(self, now_ns: int) -> None:
        """Take off what is done by now_ns, and of the others the part that is."""
        for _ in self._through(self._ways, now_ns):
            pass
        self._at_ns = max(self._at_ns, now_ns)

    def _through(self, ways: list[deque[_Queued]], until_ns: float) -> Iterator[tuple[UnderWay, float]]:
        """Copy from _at_ns until then, and take off the queues what is done, with the time at which it was."""
        at = self._at_ns
        while at < until_ns and any(ways):
            busy = [way for way in ways if way and way[0].earliest_ns <= at]
            rate = self._rate if len(busy) == 2 else 1.0
            following: list[float] = [way[0].earliest_ns for way in ways if way and way[0].earliest_ns > at]
            following += [at + way[0].left_ns / rate for way in busy]
            until = min(until_ns, *following)
            for way in busy:
                head = way[0]
                if at + head.left_ns / rate <= until:
                    way.popleft()
                    yield head.copies, until
                else:
                    head.left_ns -= (until - at) * rate
            at = until


class SimulatedWorker:
    """Four timelines: compute, host to device, device to host, and a tier below that is read from straight to the device.

    A plan waits for the swap-ins that bring blocks below its rows' positions, its own or an earlier plan's, and overlaps
    with them by layer (paper section 4.3.3): with L layers, a transfer of T that begins with the plan and compute C, it
    takes max(T/L + C, T + C/L), or T + C where swap-ins are not pipelined; a machine that cannot overlap them copies first.
    Others go on meanwhile, one after the other. Swap-outs follow the swap-ins launched so far, unless urgent. While both
    directions copy, each loses `duplex_penalty` of its rate. Tokens are a function of (Sample.key, position), so that
    baselines can be compared token for token here too. The host prepares one plan after the other, each in the overhead of a
    step; with depth 2 it does so while the plan before runs.
    """

    computes = False

    def __init__(
        self,
        model: ModelSpec,
        hardware: HardwareSpec,
        clock: VirtualClock,
        chunk_tokens: int,
        depth: int = 1,
        below_bw: float = 0.0,
    ) -> None:
        """below_bw: bytes a second that go from and to a tier below the CPU's."""
        self.depth = depth
        self.cost = simulated_cost(model, hardware, chunk_tokens)
        self._model = model
        self._hardware = hardware
        self._clock = clock
        self._chunk_tokens = chunk_tokens
        self._block_bytes = chunk_tokens * model.kept_bytes_per_token
        self._launched: deque[tuple[StepPlan, int]] = deque()  # with the time from which it is prepared
        self._tables: dict[int, list[int]] = {}
        self._load_parts = hardware.load_parts(model.layers)
        self._link = DuplexLink(hardware.duplex_penalty)
        self._reading: Way = deque()
        self._ways = self._link.inward, self._link.outward, self._reading
        self._stored: list[Moved] = []
        self._below_bw = below_bw
        self._read_ns = self._written_ns = 0
        self._host_free_ns = self._prepared_ns = 0

    def start(self, gpu_blocks: int, cpu_blocks: int) -> StartReport:
        load_s = self._model.weight_bytes / self._hardware.gpus / self._hardware.h2d_bw
        settings = {
            "engine": "simulated",
            "device": self._hardware.name,
            "dtype": self._model.dtype,
            "depth": self.depth,
        }
        return StartReport(load_s=load_s, warmup_ms=0.0, settings=settings, below_load_s=self._chunk_s())

    def launch(self, plan: StepPlan) -> None:
        assert len(self._launched) < self.depth
        overhead = round(self._hardware.step_overhead_s * 1e9) if plan.rows or plan.decodes.requests else 0
        self._host_free_ns = max(self._host_free_ns, self._clock.now_ns()) + overhead
        self._launched.append((plan, self._host_free_ns))

    def collect(self, until_ns: int | None) -> StepResult | None:
        if self._launched:
            plan, self._prepared_ns = self._launched.popleft()
            return self._perform(plan)
        copying = [way[0].ends_ns for way in self._ways if way]
        if not copying:
            return None
        ends = min(copying)
        if until_ns is not None and ends > until_ns:
            return None
        self._clock.advance_to(ends)
        return StepResult(step=None, moved=self._moved())

    def forget(self) -> None:
        """Do nothing: its blocks take no memory."""

    def close(self) -> None:
        self._launched.clear()

    def _perform(self, plan: StepPlan) -> StepResult:
        start = self._clock.now_ns()
        for slot, first_chunk, blocks in plan.tables:
            self._tables.setdefault(slot, [])[first_chunk : first_chunk + len(blocks)] = blocks
        blocks_in, blocks_out = self._start_moves(plan.moves, start) if plan.moves else (0, 0)
        samples: dict[int, Sample] = {}
        runs: list[tuple[int, int]] = []
        for row in plan.rows:
            runs += row.runs
            if row.sample is not None:
                samples[row.slot] = row.sample
        sampled = len(samples) + plan.decodes.requests
        compute_s = self.cost.iteration_s(runs, sampled, plan.decodes)
        compute = round(compute_s * 1e9)
        if plan.rows or plan.decodes.requests:  # of the overhead, what is still to come
            compute += max(0, self._prepared_ns - start) - round(self._hardware.step_overhead_s * 1e9)
        link = self._link
        begins = start if self._hardware.overlaps else max(link.inward_free_ns(start), link.outward_free_ns(start))
        ended = self._ended(plan.rows, begins, compute)
        self._clock.advance_to(ended)
        repeats = self._repeat(plan, sampled, ended) if plan.repeat > 1 else None
        tokens: dict[int, int] = {}
        for slot, sample in samples.items():
            tokens[slot] = drawn_token(sample.key, sample.position, self._model.vocab)
        return StepResult(
            step=plan.step,
            tokens=tokens,
            ended_ns=ended,
            moved=self._moved(),
            compute_ns=compute,
            stall_ns=ended - start - compute,
            h2d_bytes=blocks_in * self._block_bytes,
            d2h_bytes=blocks_out * self._block_bytes,
            repeats=Repeats(*repeats) if repeats and len(repeats[0]) else None,
        )

    def _repeat(self, plan: StepPlan, sampled: int, now_ns: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Perform the further iterations of the plan, in the time that a plan for each would take. Returns when each
        ended, and how long it took."""
        overhead = round(self._hardware.step_overhead_s * 1e9)
        steps = [1 if row.sample is not None else row.positions for row in plan.rows]
        runs = [(row.runs[-1][1] - step, row.runs[-1][1]) for row, step in zip(plan.rows, steps, strict=True)]
        until_ns = [plan.horizon_ns] if plan.horizon_ns is not None else []
        until_ns += [self._link.outward[0].ends_ns] if self._link.outward else []
        further = 0 if self._link.inward or self._reading else plan.repeat - 1
        ends_ns = min(until_ns, default=math.inf)
        begins: NDArray[np.int64] = np.empty(0, np.int64)
        ended = begins
        if further and now_ns < ends_ns:
            seconds = self.cost.following_s(runs, sampled, plan.decodes, further)
            # The host has prepared the next plan when this one ends, but for the first: no iteration is shorter.
            free_ns = max(now_ns, self._host_free_ns)
            if seconds is None:
                ended = self._one_by_one(runs, sampled, plan.decodes, free_ns, ends_ns, further)
            else:
                ended = free_ns + np.rint(seconds * 1e9).astype(np.int64).cumsum()
                ended = ended[: 1 + int(ended.searchsorted(ends_ns))]
                self.cost.ran(len(ended))
            begins = np.concatenate(([now_ns], ended[:-1]))
            self._host_free_ns = (int(begins[-1]) if len(ended) > 1 else free_ns) + overhead
            self._clock.advance_to(int(ended[-1]))
        return ended, ended - begins

    def _one_by_one(
        self, runs: Sequence[Run], sampled: int, decodes: Decodes, now_ns: int, ends_ns: float, most: int
    ) -> NDArray[np.int64]:
        """When iterations end that begin before ends_ns, each of which goes on by as many positions as it has."""
        steps = [stop - start for start, stop in runs]
        ended: list[int] = []
        while len(ended) < most and (now_ns < ends_ns or not ended):
            at = len(ended) + 1
            following = [(start + at * step, stop + at * step) for (start, stop), step in zip(runs, steps, strict=True)]
            beside = Decodes(decodes.requests, decodes.before + at * decodes.requests, decodes.longest + at)
            now_ns += round(self.cost.iteration_s(following, sampled, beside) * 1e9)
            ended.append(now_ns)
        return np.array(ended, np.int64)

    def _ended(self, rows: tuple[Row, ...], start: int, compute: int) -> int:
        """When the plan's compute is done: no layer begins before its own loads have come."""
        ended, parts = start + compute, self._load_parts
        for way in (self._link.inward, self._reading):
            for loading in reversed(way):  # whatever waits for a later load waits for the earlier ones too
                if loading.ends_ns <= start:
                    break
                if any(self._needs(row, loading) for row in rows):
                    first = loading.begins_ns + round((loading.ends_ns - loading.begins_ns) / parts)
                    ended = max(ended, first + compute, loading.ends_ns + round(compute / parts))
                    break
        return ended

    def _needs(self, row: Row, loading: UnderWay) -> bool:
        last = (row.runs[-1][1] - 1) // self._chunk_tokens
        return not loading.blocks.isdisjoint(self._tables[row.slot][: last + 1])

    def _start_moves(self, moves: tuple[Move, ...], now_ns: int) -> tuple[int, int]:
        """Swap-ins all together, a layer at a time; swap-outs one after the other. Returns the blocks of both."""
        inward: list[Move] = []
        into: list[int] = []
        out = 0
        for move in moves:
            if move.keys:
                (self._read if move.target == GPU else self._store)(move, now_ns)
            elif move.target == GPU:
                inward.append(move)
                into += move.dst
        if inward:
            seconds = self.cost.transfer_s(len(into), to_gpu=True, runs=self._runs(inward))
            tickets = tuple([move.ticket for move in inward])
            self._link.copy_in(tickets, frozenset(into), round(seconds * 1e9), now_ns)
        for move in moves:
            if move.target == CPU:
                count = len(move.src)
                seconds = self.cost.transfer_s(count, to_gpu=False, runs=self._runs([move]))
                self._link.copy_out((move.ticket,), count, round(seconds * 1e9), now_ns, after_loads=not move.urgent)
                out += count
        return len(into), out

    def _runs(self, moves: list[Move]) -> int:
        """Runs of blocks that are neighbours in both pools; 1, without counting, where a run costs nothing of its own."""
        if not self._hardware.fragment_s:
            return 1
        pairs = sorted([pair for move in moves for pair in zip(move.src, move.dst, strict=True)])
        return 1 + sum([(src + 1, dst + 1) != following for (src, dst), following in pairwise(pairs)])

    def _read(self, move: Move, now_ns: int) -> None:
        """From a tier below: at once, so that what is still to be written there is pushed back."""
        begins, takes = max(self._read_ns, now_ns), round(self._chunk_s() * len(move.dst) * 1e9)
        self._read_ns = ends = begins + takes
        self._written_ns += takes if self._written_ns > now_ns else 0
        self._reading.append(UnderWay((move.ticket,), begins, ends, len(move.dst), frozenset(move.dst)))

    def _store(self, move: Move, now_ns: int) -> None:
        """To a tier below. What waits takes memory; blocks for which there is none are not stored."""
        gone = []
        for key in move.keys:
            begins = max(self._written_ns, self._read_ns, now_ns)
            if (begins - now_ns) / 1e9 * self._below_bw > STAGING_BYTES:
                gone.append(key)
                continue
            self._written_ns = begins + round(self._chunk_s() * 1e9)
        self._stored.append(Moved(move.ticket, not gone, tuple(gone)))

    def _chunk_s(self) -> float:
        """Seconds for a chunk with the parts of all devices, since they share the tier below."""
        return self._block_bytes / self._below_bw if self._below_bw else 0.0

    def _moved(self) -> tuple[Moved, ...]:
        now = self._clock.now_ns()
        moved, self._stored = self._stored, []
        for way in self._ways:
            while way and way[0].ends_ns <= now:
                moved += map(Moved, way.popleft().tickets)
        return tuple(moved)


def drawn_tokens(key: int, position: int, count: int, vocab: int) -> TokenArray[int]:
    """The tokens at `count` positions from that one on, of whoever computes nothing: drawn_token, many at once."""
    if count <= _FEW:
        return array("i", map(drawn_token, repeat(key), range(position, position + count), repeat(vocab)))
    many = np.arange(position, position + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    many = (many ^ (many >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    many = (many ^ (many >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return array("i", ((many ^ (many >> np.uint64(31))) % np.uint64(vocab)).astype("i").tobytes())


def drawn_token(key: int, position: int, vocab: int) -> int:
    """splitmix64: a fixed, well-mixed function of two integers."""
    x = (key + position * 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return (x ^ (x >> 31)) % vocab
