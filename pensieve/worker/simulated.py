"""A worker that computes nothing and takes the time a roofline says, on a virtual clock. Imports no torch."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from pensieve.clock import VirtualClock
from pensieve.cost.roofline import Roofline
from pensieve.plan import Copy, Sample, StartReport, StepPlan, StepResult
from pensieve.specs import HardwareSpec, ModelSpec

_MASK = (1 << 64) - 1


@dataclass(slots=True)
class _Outward:
    ticket: int
    ends_ns: int


class SimulatedWorker:
    """Three timelines: compute, host to device, device to host.

    A swap-in is pipelined by layer with the compute of its own plan (paper section 4.3.3): with L layers, transfer T and
    compute C, the plan takes max(T/L + C, T + C/L). Swap-outs follow the swap-ins of their plan, unless urgent: then both
    directions run at once and each loses `duplex_penalty` of its rate. Tokens are a function of (Sample.key, position),
    so that baselines can be compared token for token here too.
    """

    depth = 1

    def __init__(self, model: ModelSpec, hardware: HardwareSpec, clock: VirtualClock, chunk_tokens: int) -> None:
        self.roofline = Roofline(model, hardware, chunk_tokens)
        self._model = model
        self._hardware = hardware
        self._clock = clock
        self._block_bytes = chunk_tokens * model.kv_bytes_per_token
        self._launched: deque[StepPlan] = deque()
        self._outward: list[_Outward] = []
        self._d2h_free_ns = 0

    def start(self, gpu_blocks: int, cpu_blocks: int) -> StartReport:
        load_s = self._model.weight_bytes / self._hardware.gpus / self._hardware.h2d_bw
        settings = {"engine": "simulated", "device": self._hardware.name, "dtype": self._model.dtype}
        return StartReport(load_s=load_s, warmup_ms=0.0, settings=settings)

    def launch(self, plan: StepPlan, horizon_ns: int | None) -> None:
        assert len(self._launched) < self.depth
        self._launched.append(plan)

    def collect(self, until_ns: int | None) -> StepResult | None:
        if self._launched:
            return self._perform(self._launched.popleft())
        if not self._outward:
            return None
        ends = min(copy.ends_ns for copy in self._outward)
        if until_ns is not None and ends > until_ns:
            return None
        self._clock.advance_to(ends)
        return StepResult(step=None, done=self._finished_copies())

    def close(self) -> None:
        self._launched.clear()

    def _perform(self, plan: StepPlan) -> StepResult:
        start = self._clock.now_ns()
        blocks_in = sum(len(copy.src) for copy in plan.swap_in)
        sampled = [row for row in plan.rows if row.sample is not None]
        compute = self.roofline.iteration_s((run for row in plan.rows for run in row.runs), len(sampled))
        both = bool(blocks_in) and any(copy.urgent for copy in plan.swap_out)
        slowed = 1 / (1 - self._hardware.duplex_penalty) if both else 1.0
        transfer = self.roofline.transfer_s(blocks_in, to_gpu=True) * slowed
        layers = self._model.layers
        total = max(transfer / layers + compute, transfer + compute / layers) if blocks_in else compute
        ended = start + round(total * 1e9)
        self._start_outward(plan.swap_out, start, start + round(transfer * 1e9), slowed)
        self._clock.advance_to(ended)
        tokens = {row.slot: self._token(row.sample) for row in sampled if row.sample is not None}
        return StepResult(
            step=plan.step,
            tokens=tokens,
            ended_ns=(ended,),
            done=tuple(copy.ticket for copy in plan.swap_in) + self._finished_copies(),
            compute_ns=round(compute * 1e9),
            stall_ns=round((total - compute) * 1e9),
            h2d_bytes=blocks_in * self._block_bytes,
            d2h_bytes=sum(len(copy.src) for copy in plan.swap_out) * self._block_bytes,
        )

    def _start_outward(self, copies: tuple[Copy, ...], now_ns: int, swapped_in_ns: int, slowed: float) -> None:
        for copy in copies:
            begin = max(self._d2h_free_ns, now_ns if copy.urgent else swapped_in_ns)
            seconds = self.roofline.transfer_s(len(copy.src), to_gpu=False) * (slowed if copy.urgent else 1.0)
            self._d2h_free_ns = begin + round(seconds * 1e9)
            self._outward.append(_Outward(copy.ticket, self._d2h_free_ns))

    def _finished_copies(self) -> tuple[int, ...]:
        now = self._clock.now_ns()
        done = tuple(copy.ticket for copy in self._outward if copy.ends_ns <= now)
        if done:
            self._outward = [copy for copy in self._outward if copy.ends_ns > now]
        return done

    def _token(self, sample: Sample) -> int:
        # splitmix64: a fixed, well-mixed function of two integers
        x = (sample.key + sample.position * 0x9E3779B97F4A7C15) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        return (x ^ (x >> 31)) % self._model.vocab
