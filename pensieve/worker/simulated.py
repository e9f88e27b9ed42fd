"""A worker that computes nothing and takes the time a cost model says, on a virtual clock. Imports no torch."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass
from operator import sub

import numpy as np

from pensieve.clock import VirtualClock
from pensieve.cost.simulated import simulated_cost
from pensieve.plan import Copy, DiskLoad, DiskStore, Repeats, Row, Sample, StartReport, StepPlan, StepResult
from pensieve.request import TokenArray
from pensieve.specs import HardwareSpec, ModelSpec
from pensieve.worker.base import DISK_STAGING_BYTES
from pensieve.worker.timeline import Timeline

_MASK = (1 << 64) - 1
_FEW = 12  # tokens that are drawn sooner one by one


@dataclass(slots=True)
class _UnderWay:
    """Copies of one plan in one direction. blocks: those that swap-ins fill on the GPU, layer after layer."""

    tickets: tuple[int, ...]
    begins_ns: int
    ends_ns: int
    blocks: frozenset[int] = frozenset()


class SimulatedWorker:
    """Four timelines: compute, host to device, device to host, and a disk that is read from straight to the device.

    A plan waits for the swap-ins that bring blocks below its rows' positions, its own or an earlier plan's, and overlaps
    with them by layer (paper section 4.3.3): with L layers, a transfer of T that begins with the plan and compute C, it
    takes max(T/L + C, T + C/L); a machine that cannot overlap them copies first. Others go on meanwhile, one after the
    other. Swap-outs follow the swap-ins launched so far, unless urgent: then both directions run at once and each loses
    `duplex_penalty` of its rate. Tokens are a function of (Sample.key, position), so that baselines can be compared token
    for token here too. The host prepares one plan after the other, each in the overhead of a step; with depth 2 it does so
    while the plan before runs.
    """

    computes = False

    def __init__(
        self, model: ModelSpec, hardware: HardwareSpec, clock: VirtualClock, chunk_tokens: int, depth: int = 1
    ) -> None:
        self.timeline: Timeline | None = None
        self.depth = depth
        self.cost = simulated_cost(model, hardware, chunk_tokens)
        self._model = model
        self._hardware = hardware
        self._clock = clock
        self._chunk_tokens = chunk_tokens
        self._block_bytes = chunk_tokens * model.kv_bytes_per_token
        self._launched: deque[tuple[StepPlan, int]] = deque()  # with the time from which it is prepared
        self._tables: dict[int, list[int]] = {}
        # Each direction performs its copies one after the other, so the oldest is done first.
        self._loading: deque[_UnderWay] = deque()
        self._outward: deque[_UnderWay] = deque()
        self._reading: deque[_UnderWay] = deque()
        self._unkept: list[bytes] = []
        self._h2d_free_ns = 0
        self._d2h_free_ns = 0
        self._disk_read_ns = self._disk_written_ns = 0
        self._host_free_ns = self._prepared_ns = 0

    def start(self, gpu_blocks: int, cpu_blocks: int) -> StartReport:
        load_s = self._model.weight_bytes / self._hardware.gpus / self._hardware.h2d_bw
        settings = {
            "engine": "simulated",
            "device": self._hardware.name,
            "dtype": self._model.dtype,
            "depth": self.depth,
        }
        return StartReport(load_s=load_s, warmup_ms=0.0, settings=settings, disk_load_s=self._disk_s())

    def launch(self, plan: StepPlan) -> None:
        assert len(self._launched) < self.depth
        overhead = round(self._hardware.step_overhead_s * 1e9) if plan.rows else 0
        self._host_free_ns = max(self._host_free_ns, self._clock.now_ns()) + overhead
        self._launched.append((plan, self._host_free_ns))

    def collect(self, until_ns: int | None) -> StepResult | None:
        if self._launched:
            plan, self._prepared_ns = self._launched.popleft()
            return self._perform(plan)
        copying = [copies[0].ends_ns for copies in (self._loading, self._outward, self._reading) if copies]
        if not copying:
            return None
        ends = min(copying)
        if until_ns is not None and ends > until_ns:
            return None
        self._clock.advance_to(ends)
        return StepResult(step=None, done=self._finished_copies())

    def close(self) -> None:
        self._launched.clear()

    def _perform(self, plan: StepPlan) -> StepResult:
        start = self._clock.now_ns()
        for slot, first_chunk, blocks in plan.tables:
            self._tables.setdefault(slot, [])[first_chunk : first_chunk + len(blocks)] = blocks
        blocks_in = sum(len(copy.src) for copy in plan.swap_in)
        both = bool(blocks_in) and any(copy.urgent for copy in plan.swap_out)
        slowed = 1 / (1 - self._hardware.duplex_penalty) if both else 1.0
        self._start_loading(plan.swap_in, start, slowed)
        self._start_outward(plan.swap_out, start, slowed)
        self._start_disk(plan.disk, start)
        sampled = [row for row in plan.rows if row.sample is not None]
        compute_s = self.cost.iteration_s((run for row in plan.rows for run in row.runs), len(sampled))
        compute = round(compute_s * 1e9)
        if plan.rows:  # of the overhead, what is still to come
            compute += max(0, self._prepared_ns - start) - round(self._hardware.step_overhead_s * 1e9)
        begins = start if self._hardware.overlaps else max(start, self._h2d_free_ns, self._d2h_free_ns)
        ended = self._ended(plan.rows, begins, compute)
        self._clock.advance_to(ended)
        if self.timeline is not None and plan.rows:
            positions = sum(row.positions for row in plan.rows)
            self.timeline.add("compute", "iteration", start, ended, requests=len(plan.rows), positions=positions)
        repeats = self._repeat(plan, sampled, ended) if plan.repeat > 1 else None
        tokens = {row.slot: self._token(row.sample) for row in sampled if row.sample is not None}
        return StepResult(
            step=plan.step,
            tokens=tokens,
            ended_ns=ended,
            done=self._finished_copies(),
            unkept=self._take_unkept(),
            compute_ns=compute,
            stall_ns=ended - start - compute,
            h2d_bytes=blocks_in * self._block_bytes,
            d2h_bytes=sum(len(copy.src) for copy in plan.swap_out) * self._block_bytes,
            repeats=repeats,
        )

    def _repeat(self, plan: StepPlan, sampled: list[Row], now_ns: int) -> Repeats:
        """Go on, as plans of one iteration each would."""
        overhead = round(self._hardware.step_overhead_s * 1e9)
        steps = [1 if row.sample is not None else row.positions for row in plan.rows]
        runs = [(row.runs[-1][1] - step, row.runs[-1][1]) for row, step in zip(plan.rows, steps, strict=True)]
        seconds = self.cost.following_s(runs, len(sampled))
        until_ns = [plan.horizon_ns] if plan.horizon_ns is not None else []
        until_ns += [self._outward[0].ends_ns] if self._outward else []
        further = 0 if self._loading or self._reading else plan.repeat - 1
        ends_ns, host_ns = min(until_ns, default=None), self._host_free_ns
        begins: list[int] = []
        for _ in range(further):
            if ends_ns is not None and now_ns >= ends_ns:
                break
            begins.append(now_ns)
            compute = round(next(seconds) * 1e9)
            if host_ns > now_ns:  # of the overhead, what is still to come
                host_ns += overhead
                now_ns = host_ns + compute - overhead
            else:
                host_ns = now_ns + overhead
                now_ns += compute
        self._host_free_ns = host_ns
        ended = [*begins[1:], now_ns] if begins else []
        if self.timeline is not None:
            count, positions = len(runs), sum(steps)
            for start, end in zip(begins, ended, strict=True):
                self.timeline.add("compute", "iteration", start, end, requests=count, positions=positions)
        self._clock.advance_to(now_ns)
        tokens = {}
        for row in sampled:
            assert row.sample is not None
            position, key = row.sample.position, row.sample.key
            tokens[row.slot] = self._draws(key, position + 1, position + 1 + len(ended))
        return Repeats(tuple(ended), tuple(map(sub, ended, begins)), tokens)

    def _ended(self, rows: tuple[Row, ...], start: int, compute: int) -> int:
        """When the plan's compute is done: no layer begins before its own loads have come."""
        ended, layers = start + compute, self._model.layers
        for link in (self._loading, self._reading):
            for loading in reversed(link):  # whatever waits for a later load waits for the earlier ones too
                if loading.ends_ns <= start:
                    break
                if any(self._needs(row, loading) for row in rows):
                    first = loading.begins_ns + round((loading.ends_ns - loading.begins_ns) / layers)
                    ended = max(ended, first + compute, loading.ends_ns + round(compute / layers))
                    break
        return ended

    def _needs(self, row: Row, loading: _UnderWay) -> bool:
        last = (row.runs[-1][1] - 1) // self._chunk_tokens
        return not loading.blocks.isdisjoint(self._tables[row.slot][: last + 1])

    def _start_loading(self, copies: tuple[Copy, ...], now_ns: int, slowed: float) -> None:
        """All copies of a plan together, a layer at a time."""
        if copies:
            blocks = frozenset(block for copy in copies for block in copy.dst)
            begins = max(self._h2d_free_ns, now_ns)
            seconds = self.cost.transfer_s(len(blocks), to_gpu=True) * slowed
            self._h2d_free_ns = begins + round(seconds * 1e9)
            tickets = tuple(copy.ticket for copy in copies)
            self._loading.append(_UnderWay(tickets, begins, self._h2d_free_ns, blocks))
            if self.timeline is not None:
                self.timeline.add("CPU to GPU", "swap in", begins, self._h2d_free_ns, blocks=len(blocks))

    def _start_outward(self, copies: tuple[Copy, ...], now_ns: int, slowed: float) -> None:
        for copy in copies:
            begins = max(self._d2h_free_ns, now_ns if copy.urgent else max(now_ns, self._h2d_free_ns))
            seconds = self.cost.transfer_s(len(copy.src), to_gpu=False) * (slowed if copy.urgent else 1.0)
            self._d2h_free_ns = begins + round(seconds * 1e9)
            self._outward.append(_UnderWay((copy.ticket,), begins, self._d2h_free_ns))
            if self.timeline is not None:
                self.timeline.add("GPU to CPU", "swap out", begins, self._d2h_free_ns, blocks=len(copy.src))

    def _start_disk(self, work: tuple[DiskStore | DiskLoad, ...], now_ns: int) -> None:
        """Reads go first, and push what is still to be written back; that takes memory, of which there is so much."""
        for one in work:
            if isinstance(one, DiskLoad):
                begins, takes = max(self._disk_read_ns, now_ns), round(self._disk_s() * len(one.dst) * 1e9)
                self._disk_read_ns = ends = begins + takes
                self._disk_written_ns += takes if self._disk_written_ns > now_ns else 0
                self._reading.append(_UnderWay((one.ticket,), begins, ends, frozenset(one.dst)))
            else:
                begins = max(self._disk_written_ns, self._disk_read_ns, now_ns)
                if (begins - now_ns) / 1e9 * self._hardware.disk_bw > DISK_STAGING_BYTES:
                    self._unkept.append(one.key)
                    continue
                self._disk_written_ns = ends = begins + round(self._disk_s() * 1e9)
            if self.timeline is not None:
                self.timeline.add("disk", "read" if isinstance(one, DiskLoad) else "write", begins, ends)

    def _disk_s(self) -> float:
        """Of a chunk of all devices; they share the disk."""
        return self._block_bytes / self._hardware.disk_bw if self._hardware.disk_bw else 0.0

    def _take_unkept(self) -> tuple[bytes, ...]:
        unkept, self._unkept = tuple(self._unkept), []
        return unkept

    def _finished_copies(self) -> tuple[int, ...]:
        now = self._clock.now_ns()
        done: list[int] = []
        for copies in (self._loading, self._outward, self._reading):
            while copies and copies[0].ends_ns <= now:
                done += copies.popleft().tickets
        return tuple(done)

    def _token(self, sample: Sample) -> int:
        (token,) = self._draws(sample.key, sample.position, sample.position + 1)
        return token

    def _draws(self, key: int, start: int, stop: int) -> TokenArray[int]:
        return drawn_tokens(key, start, stop, self._model.vocab)


def drawn_tokens(key: int, start: int, stop: int, vocab: int) -> TokenArray[int]:
    """The tokens at positions [start, stop) of whoever computes nothing: splitmix64, a fixed, well-mixed function of two
    integers."""
    mask = _MASK
    if stop - start > _FEW:
        many = np.arange(start, stop, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
        many = (many ^ (many >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        many = (many ^ (many >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return array("i", ((many ^ (many >> np.uint64(31))) % np.uint64(vocab)).astype("i").tobytes())
    tokens = array("i")
    for position in range(start, stop):
        x = (key + position * 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        tokens.append((x ^ (x >> 31)) % vocab)
    return tokens
