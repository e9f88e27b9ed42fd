"""How blocks get over the link of a GPU: found out by measurement when a worker starts.

Which is fastest depends on the device, its driver, the link, the bytes of a block and how many fragments there are at once.
Copy engines leave all multiprocessors to the compute, so they are the choice unless the kernel is clearly faster.
"""

from __future__ import annotations

import importlib.util
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Literal

import torch

from pensieve.errors import EngineMissing, HardwareMissing
from pensieve.worker.torch.kv_tensors import KvTensors
from pensieve.worker.torch.transfers.driver import BatchCopier
from pensieve.worker.torch.transfers.link import BlockRun, CallCopier, Copier, Haul

_log = logging.getLogger(__name__)

CopyWay = Literal["auto", "dma", "kernel"]
_MARGIN = 1.1  # how many times longer copy engines must take than the kernel
_RUNS, _BYTES = 256, 64 * 2**20  # of the largest sample in one layer: 8K tokens in blocks of 32, all apart
_COUNTS, _LENGTHS = (4, 16, 64), (2, 4, 8, 16)
_LAYERS, _ROUNDS = 2, 2
_SIDE, _BUSY_S, _MOST_PRODUCTS = 2048, 2.5e-3, 4096  # of the products beside which copies are timed
_CHECKED = 20
_UNEVEN = (BlockRun(1, 9, 2), BlockRun(4, 0, 1), BlockRun(6, 2, 3), BlockRun(10, 6, 1), BlockRun(12, 13, 1))


@dataclass(frozen=True, slots=True)
class Sample:
    """So many runs, each of so many blocks, none adjacent to another."""

    runs: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Took:
    """Of one layer: for how long the host was busy with it, and the stream, and how much later compute beside it ended."""

    host_s: float
    device_s: float
    lost_s: float = 0.0

    @property
    def seconds(self) -> float:
        """All count: the host launches nothing meanwhile, a forward waits for the stream, and another one is slowed down."""
        return self.host_s + self.device_s + self.lost_s


@dataclass(frozen=True, slots=True)
class Limits:
    """The kernel copies runs of up to `longest` blocks where there are `least` such runs; 0: none."""

    longest: int = 0
    least: int = 1


@dataclass(frozen=True, slots=True)
class Copying:
    """What copies in each direction. note: the decision in words.

    figures: what it was taken by, for each direction, way and sample: the rate (gb_s), and a run's share of the host's time
    (host_us) and of the time that compute beside it lost (compute_lost_us).
    """

    inward: Copier
    outward: Copier
    note: str
    figures: Mapping[str, Mapping[str, float]]


Stopwatch = Callable[[Copier, Haul], Took]


class SplitCopier:
    """Short runs by the kernel where they are many, all others by DMA, one after the other on the same stream."""

    def __init__(self, dma: Copier, kernel: Copier, limits: Limits) -> None:
        self._dma, self._kernel, self.limits = dma, kernel, limits

    @property
    def name(self) -> str:
        return (
            f"{self._kernel.name} for runs of up to {self.limits.longest} blocks where there are {self.limits.least} or "
            f"more, else {self._dma.name}"
        )

    def prepare(self, haul: Haul) -> Callable[[int], None]:
        short = [run for run in haul.runs if run.blocks <= self.limits.longest]
        if len(short) < self.limits.least:
            return self._dma.prepare(haul)
        by_kernel = self._kernel.prepare(replace(haul, runs=short))
        if len(short) == len(haul.runs):
            return by_kernel
        by_dma = self._dma.prepare(replace(haul, runs=[run for run in haul.runs if run.blocks > self.limits.longest]))

        def copy(layer: int) -> None:
            by_kernel(layer)
            by_dma(layer)

        return copy


def choose_copying(tensors: KvTensors, way: CopyWay = "auto") -> Copying:
    """Measure and decide, for each direction by itself. Only on a GPU, before the pools hold anything: blocks are written
    to, and zeroed again.

    way: dma leaves out the kernel, kernel everything else. Raises EngineMissing where the kernel is asked for and cannot
    run.
    """
    assert tensors.device.type == "cuda" and tensors.cpu_blocks, "there is no link to measure"
    kernel, missing = _kernel(tensors, way)
    if kernel is None and way == "kernel":
        raise EngineMissing(f"hardware.copies=kernel: {missing}; use hardware.copies=auto.")
    engines, lacking = _engines()
    stopwatch = _CudaStopwatch(tensors.device, tensors.dtype)
    copying = decide_copying(tensors, way, engines, kernel, missing, stopwatch)
    copying = replace(copying, note="; ".join(filter(None, (copying.note, lacking))))
    _log.info("Copies between the tiers: %s", copying.note)
    return copying


def decide_copying(
    tensors: KvTensors,
    way: CopyWay,
    engines: Sequence[Copier],
    kernel: Copier | None,
    missing: str,
    stopwatch: Stopwatch,
) -> Copying:
    """engines: by copy engine, the last resort first. missing: why there is no kernel."""
    chosen: list[Copier] = []
    notes: list[str] = []
    figures: dict[str, dict[str, float]] = {}
    for direction, source, target in (("in", tensors.cpu, tensors.gpu), ("out", tensors.gpu, tensors.cpu)):
        samples = samples_of(min(source.shape[1], target.shape[1]), tensors.layer_block_bytes)
        candidates = [*engines, *([] if kernel is None else [kernel])]
        try:
            wrong = {c.name: why for c in candidates if (why := _fault(c, source, target))}
            usable = [c for c in candidates if c.name not in wrong]
            took = _measure(usable, source, target, samples, stopwatch)
        finally:
            _zero(source, target, 2 * _RUNS)
        if way == "kernel" and kernel is not None and kernel.name in wrong:
            raise EngineMissing(f"hardware.copies=kernel: {wrong[kernel.name]}; use hardware.copies=auto.")
        dmas = [c for c in usable if c is not kernel]
        if not dmas:
            raise HardwareMissing(f"Copies between the tiers fail on this machine: {wrong}; use cache.cpu=0.")
        dma = min(dmas, key=lambda c: took[c.name][samples[0]].seconds) if samples else dmas[0]
        copier = dma
        if kernel in usable and kernel is not None and way != "dma":
            limits = Limits(tensors.gpu_blocks, 1)
            if way == "auto":
                limits = limits_of(took[dma.name], took[kernel.name], samples) if samples else Limits()
            copier = SplitCopier(dma, kernel, limits) if limits.longest else dma
        chosen.append(copier)
        notes.append(f"{direction}: {copier.name}" + "".join(f" (not {name}: {why})" for name, why in wrong.items()))
        for name, times in took.items():
            for sample, one in times.items():
                figures[f"{direction}, {name}, {_words(sample, tensors.layer_block_bytes)}"] = {
                    "gb_s": sample.runs * sample.blocks * tensors.layer_block_bytes / one.device_s / 1e9,
                    "host_us": one.host_s * 1e6 / sample.runs,
                    "compute_lost_us": one.lost_s * 1e6 / sample.runs,
                }
    note = "; ".join(notes) + (f"; no kernel: {missing}" if missing and way != "dma" else "")
    return Copying(chosen[0], chosen[1], note, figures)


def samples_of(blocks: int, layer_block_bytes: int) -> list[Sample]:
    """The largest of single blocks first, then fewer of them, then as many bytes in longer runs; pools have `blocks`."""
    most = min(_RUNS, _BYTES // layer_block_bytes, blocks // 2)
    if most < _COUNTS[0]:
        return []
    fewer = [Sample(count, 1) for count in _COUNTS if count < most]
    longer = [Sample(min(most // length, blocks // (length + 1)), length) for length in _LENGTHS]
    return [Sample(most, 1), *fewer, *(sample for sample in longer if sample.runs)]


def limits_of(dma: Mapping[Sample, Took], kernel: Mapping[Sample, Took], samples: Sequence[Sample]) -> Limits:
    """As far as the kernel wins, from the largest sample of single blocks on: towards longer runs, and towards fewer."""

    def wins(sample: Sample) -> bool:
        return dma[sample].seconds > _MARGIN * kernel[sample].seconds

    if not wins(samples[0]):
        return Limits()
    longest, least = 1, samples[0].runs
    for sample in sorted((s for s in samples if s.blocks > 1), key=lambda s: s.blocks):
        if not wins(sample):
            break
        longest = sample.blocks
    for sample in sorted((s for s in samples if s.blocks == 1), key=lambda s: -s.runs):
        if not wins(sample):
            break
        least = sample.runs
    return Limits(longest, least)


def scattered(sample: Sample) -> list[BlockRun]:
    """A block apart in both pools, in another order in the target."""
    starts = [number * (sample.blocks + 1) for number in range(sample.runs)]
    targets = random.Random(0).sample(starts, len(starts))
    return [BlockRun(src, dst, sample.blocks) for src, dst in zip(starts, targets, strict=True)]


class _CudaStopwatch:
    """Times copies beside matrix products, as they will run beside a forward."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._lane, self._compute = torch.cuda.Stream(device, priority=-1), torch.cuda.current_stream(device)
        self._factors = [torch.zeros(_SIDE, _SIDE, device=device, dtype=dtype) for _ in range(3)]
        self._products, self._alone_s = 1, 0.0
        self._busy()  # the first one loads libraries
        while self._alone_s < _BUSY_S and self._products < _MOST_PRODUCTS:
            self._products *= 2
            self._alone_s = min(self._busy() for _ in range(_ROUNDS))

    def __call__(self, copier: Copier, haul: Haul) -> Took:
        layers = min(_LAYERS, haul.layers)
        with torch.cuda.stream(self._lane):
            started = perf_counter()
            copy = copier.prepare(haul)
            prepared_s = perf_counter() - started
        took: list[float] = []

        def copy_some() -> None:
            with torch.cuda.stream(self._lane):
                began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                began.record(self._lane)
                started = perf_counter()
                for layer in range(layers):
                    copy(layer)
                host_s = perf_counter() - started
                ended.record(self._lane)
                ended.synchronize()
                took.extend((host_s, began.elapsed_time(ended) / 1e3))

        beside_s = self._busy(copy_some)
        host_s, device_s = took
        # Where the copies outlast the products, these lost as much in the rest of the time.
        lost_s = max(0.0, beside_s - self._alone_s) * max(1.0, device_s / beside_s)
        return Took(prepared_s / haul.layers + host_s / layers, device_s / layers, lost_s / layers)

    def _busy(self, beside: Callable[[], None] | None = None) -> float:
        """Seconds of the products on the stream of the compute; `beside` is called when they are under way."""
        torch.cuda.synchronize(self._device)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        left, right, result = self._factors
        began.record(self._compute)
        for _ in range(self._products):
            torch.mm(left, right, out=result)
        ended.record(self._compute)
        if beside is not None:
            beside()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3


def _measure(
    copiers: Sequence[Copier],
    source: torch.Tensor,
    target: torch.Tensor,
    samples: Sequence[Sample],
    stopwatch: Stopwatch,
) -> dict[str, dict[Sample, Took]]:
    """The fastest of some rounds, in which the copiers take turns."""
    took: dict[str, dict[Sample, Took]] = {copier.name: {} for copier in copiers}
    for sample in samples:
        haul = Haul(scattered(sample), source, target)
        for _ in range(1 + _ROUNDS):  # the first one compiles, and makes memory known to the driver
            for copier in copiers:
                now, best = stopwatch(copier, haul), took[copier.name].get(sample)
                took[copier.name][sample] = now if best is None or now.seconds < best.seconds else best
    return took


def _fault(copier: Copier, source: torch.Tensor, target: torch.Tensor) -> str:
    """What is wrong with what it copies; "" where every byte arrives, and no other block changes."""
    blocks = min(source.shape[1], target.shape[1], _CHECKED)
    runs = [run for run in _UNEVEN if max(run.src, run.dst) + run.blocks < blocks] or [BlockRun(0, blocks - 1, 1)]
    layers = sorted({0, source.shape[0] - 1})
    _zero(source, target, blocks)
    for layer in layers:
        for run in runs:
            _fill(source[layer, run.src : run.src + run.blocks])
    _settle(source, target)
    try:
        with _aside(source, target):
            copy = copier.prepare(Haul(runs, source, target))
            for layer in layers:
                copy(layer)
        _settle(source, target)
    except Exception as error:  # a compiler, a driver: anything that says that this way is not for this machine
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    arrived = {run.dst + i: run.src + i for run in runs for i in range(run.blocks)}
    for layer in layers:
        for block in range(blocks):
            wanted = source[layer, arrived[block]] if block in arrived else torch.zeros_like(target[layer, block])
            if not torch.equal(_bytes(target[layer, block]), _bytes(wanted)):
                return "it copied wrongly"
    return ""


def _fill(blocks: torch.Tensor) -> None:
    noise = torch.randint(0, 256, (blocks.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    blocks.copy_(noise.view(blocks.dtype).view(blocks.shape))


def _bytes(block: torch.Tensor) -> torch.Tensor:
    return block.cpu().contiguous().view(-1).view(torch.uint8)


def _zero(source: torch.Tensor, target: torch.Tensor, blocks: int) -> None:
    """The first blocks of those layers that samples and checks write to."""
    _settle(source, target)
    for pool in (source, target):
        pool[:_LAYERS, :blocks].zero_()
        pool[-1, :blocks].zero_()
    _settle(source, target)


def _settle(source: torch.Tensor, target: torch.Tensor) -> None:
    """The streams used here know nothing of each other."""
    if (device := _gpu_of(source, target)) is not None:
        torch.cuda.synchronize(device)


def _aside(source: torch.Tensor, target: torch.Tensor) -> AbstractContextManager[object]:
    """A stream of its own, as the lanes have: the driver takes no batch on the default one."""
    device = _gpu_of(source, target)
    return nullcontext() if device is None else torch.cuda.stream(torch.cuda.Stream(device))


def _gpu_of(source: torch.Tensor, target: torch.Tensor) -> torch.device | None:
    return next((pool.device for pool in (source, target) if pool.is_cuda), None)


def _engines() -> tuple[list[Copier], str]:
    """Ways of using copy engines, the last resort first, and why there are no more."""
    try:
        return [CallCopier(), BatchCopier()], ""
    except EngineMissing as error:
        return [CallCopier()], str(error).rstrip(".")


def _kernel(tensors: KvTensors, way: CopyWay) -> tuple[Copier | None, str]:
    """The kernel, or why there is none."""
    if way == "dma":
        return None, ""
    if importlib.util.find_spec("triton") is None:
        return None, "it needs the package triton (pip install 'pensieve[triton]')"
    from pensieve.worker.torch.transfers.copies import WORD_BYTES, KernelCopier

    if tensors.layer_block_bytes % WORD_BYTES:
        return None, f"a block of {tensors.layer_block_bytes} bytes a layer is no multiple of {WORD_BYTES}"
    return KernelCopier(), ""


def _words(sample: Sample, layer_block_bytes: int) -> str:
    return f"{sample.runs} x {sample.blocks * layer_block_bytes / 1024:g} KiB"
