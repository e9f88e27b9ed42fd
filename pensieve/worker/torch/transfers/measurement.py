"""Measures ways of copying: the time of scattered runs beside matrix products, and whether every byte arrives."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter

import torch

from pensieve.worker.block_runs import BlockRun
from pensieve.worker.torch.transfers.link import Copier, Haul, gpu_of

_RUNS, _BYTES = 256, 64 * 2**20  # of the largest sample in one layer: 8K tokens in blocks of 32, all apart
_COUNTS, _LENGTHS = (4, 16, 64), (2, 4, 8, 16)
_LAYERS, _ROUNDS = 2, 2
_SIDE, _BUSY_S, _MOST_PRODUCTS = 2048, 2.5e-3, 4096  # of the products beside which copies are timed
_CHECKED = 20
_UNEVEN = (BlockRun(1, 9, 2), BlockRun(4, 0, 1), BlockRun(6, 2, 3), BlockRun(10, 6, 1), BlockRun(12, 13, 1))


@dataclass(frozen=True, slots=True)
class Sample:
    """`runs` runs of `blocks` blocks each, none adjacent to another."""

    runs: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Took:
    """For one layer: how long the host was busy, how long the stream, and how much later compute beside it ended."""

    host_s: float
    device_s: float
    lost_s: float = 0.0

    @property
    def seconds(self) -> float:
        """The sum: the host launches nothing meanwhile, a forward waits for the stream, and another one is slowed down."""
        return self.host_s + self.device_s + self.lost_s


Stopwatch = Callable[[Copier, Haul], Took]


def samples_of(blocks: int, layer_block_bytes: int) -> list[Sample]:
    """For pools of `blocks`: the most single blocks first, then fewer of them, then as many bytes in longer runs."""
    most = min(_RUNS, _BYTES // layer_block_bytes, blocks // 2)
    if most < _COUNTS[0]:
        return []
    fewer = [Sample(count, 1) for count in _COUNTS if count < most]
    longer = [Sample(min(most // length, blocks // (length + 1)), length) for length in _LENGTHS]
    return [Sample(most, 1), *fewer, *(sample for sample in longer if sample.runs)]


def scattered(sample: Sample) -> list[BlockRun]:
    """Make the sample's runs, with a block between them in both pools, and in another order in the target."""
    starts = [number * (sample.blocks + 1) for number in range(sample.runs)]
    targets = random.Random(0).sample(starts, len(starts))
    return [BlockRun(src, dst, sample.blocks) for src, dst in zip(starts, targets, strict=True)]


class CudaStopwatch:
    """Times copies beside matrix products, as they will run beside a forward."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._lane, self._compute = torch.cuda.Stream(device, priority=-1), torch.cuda.current_stream(device)
        self._factors = [torch.zeros(_SIDE, _SIDE, device=device, dtype=dtype) for _ in range(3)]
        self._products, self._alone_s = 1, 0.0
        self._multiply()  # the first one loads libraries
        while self._alone_s < _BUSY_S and self._products < _MOST_PRODUCTS:
            self._products *= 2
            self._alone_s = min(self._multiply() for _ in range(_ROUNDS))

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

        beside_s = self._multiply(copy_some)
        host_s, device_s = took
        # Where the copies outlast the products, products would have lost as much in the rest of the time.
        lost_s = max(0.0, beside_s - self._alone_s) * max(1.0, device_s / beside_s)
        return Took(prepared_s / haul.layers + host_s / layers, device_s / layers, lost_s / layers)

    def _multiply(self, beside: Callable[[], None] | None = None) -> float:
        """Seconds that the products take on the compute stream; `beside` is called once they are under way."""
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


def measure(
    copiers: Sequence[Copier],
    source: torch.Tensor,
    target: torch.Tensor,
    samples: Sequence[Sample],
    stopwatch: Stopwatch,
) -> dict[str, dict[Sample, Took]]:
    """Time each copier on each sample, and keep the fastest of some rounds in which the copiers take turns."""
    took: dict[str, dict[Sample, Took]] = {copier.name: {} for copier in copiers}
    for sample in samples:
        haul = Haul(scattered(sample), source, target)
        for _ in range(1 + _ROUNDS):  # the first one compiles, and makes memory known to the driver
            for copier in copiers:
                now, best = stopwatch(copier, haul), took[copier.name].get(sample)
                took[copier.name][sample] = now if best is None or now.seconds < best.seconds else best
    return took


def find_fault(copier: Copier, source: torch.Tensor, target: torch.Tensor) -> str:
    """What is wrong with this way of copying; "" where every byte arrives and no other block changes."""
    blocks = min(source.shape[1], target.shape[1], _CHECKED)
    runs = [run for run in _UNEVEN if max(run.src, run.dst) + run.blocks < blocks] or [BlockRun(0, blocks - 1, 1)]
    layers = sorted({0, source.shape[0] - 1})
    _zero(source, target, blocks)
    for layer in layers:
        for run in runs:
            _fill(source[layer, run.src : run.src + run.blocks])
    _synchronize(source, target)
    try:
        with _own_stream(source, target):
            copy = copier.prepare(Haul(runs, source, target))
            for layer in layers:
                copy(layer)
        _synchronize(source, target)
    except Exception as error:  # of a compiler, a driver: whatever says that this way does not work on this machine
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    arrived = {run.dst + i: run.src + i for run in runs for i in range(run.blocks)}
    for layer in layers:
        for block in range(blocks):
            wanted = source[layer, arrived[block]] if block in arrived else torch.zeros_like(target[layer, block])
            if not torch.equal(_bytes(target[layer, block]), _bytes(wanted)):
                return "it copied wrongly"
    return ""


def zero_samples(source: torch.Tensor, target: torch.Tensor) -> None:
    """Zero every block that find_fault and measure wrote to."""
    _zero(source, target, 2 * _RUNS)


def _fill(blocks: torch.Tensor) -> None:
    noise = torch.randint(0, 256, (blocks.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    blocks.copy_(noise.view(blocks.dtype).view(blocks.shape))


def _bytes(block: torch.Tensor) -> torch.Tensor:
    return block.cpu().contiguous().view(-1).view(torch.uint8)


def _zero(source: torch.Tensor, target: torch.Tensor, blocks: int) -> None:
    """The first `blocks` of the first layers and of the last one: samples and checks write to no others."""
    _synchronize(source, target)
    for pool in (source, target):
        pool[:_LAYERS, :blocks].zero_()
        pool[-1, :blocks].zero_()
    _synchronize(source, target)


def _synchronize(source: torch.Tensor, target: torch.Tensor) -> None:
    """The streams used here do not wait for each other."""
    if (device := gpu_of(source, target)) is not None:
        torch.cuda.synchronize(device)


def _own_stream(source: torch.Tensor, target: torch.Tensor) -> AbstractContextManager[object]:
    """Use a stream of its own inside the block, as lanes do: the driver takes no batch on the default stream."""
    device = gpu_of(source, target)
    return nullcontext() if device is None else torch.cuda.stream(torch.cuda.Stream(device))
