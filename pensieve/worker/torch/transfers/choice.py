"""Which way of copying a worker uses, decided by measurement when it starts.

The fastest depends on the device, its driver, the link, the bytes of a block and the number of fragments. Copy engines leave
all multiprocessors to the compute, so they are chosen unless the kernel is clearly faster.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pensieve.errors import EngineMissing, HardwareMissing
from pensieve.worker.torch.kv_tensors import KvTensors
from pensieve.worker.torch.transfers.copies import (
    WORD_BYTES,
    BatchCopier,
    CallCopier,
    KernelCopier,
    Limits,
    SplitCopier,
)
from pensieve.worker.torch.transfers.link import Copier
from pensieve.worker.torch.transfers.measurement import (
    CudaStopwatch,
    Sample,
    Stopwatch,
    Took,
    find_fault,
    measure,
    samples_of,
    zero_samples,
)

_log = logging.getLogger(__name__)

CopyWay = Literal["auto", "dma", "kernel"]
_MARGIN = 1.1  # how many times as long as the kernel copy engines must take before it is chosen


@dataclass(frozen=True, slots=True)
class Copying:
    """What copies in each direction. note: the decision in words.

    figures: the measurements behind it, for each direction, way and sample: the rate (gb_s), and a run's share of the host's
    time (host_us) and of the time that compute beside it lost (compute_lost_us).
    """

    inward: Copier
    outward: Copier
    note: str
    figures: Mapping[str, Mapping[str, float]]


_Key = tuple[object, ...]
_decided: dict[_Key, Copying] = {}
"""What was measured in this process: by device, and all of the pools that the decision depends on."""


def choose_copying(tensors: KvTensors, way: CopyWay = "auto") -> Copying:
    """Measure and decide, each direction by itself, once a process for pools alike; what was decided before must bring
    every byte in these pools too. Only on a GPU, and before the pools hold anything: blocks are written to, and zeroed again.

    way: "dma" leaves out the kernel, "kernel" everything else. Raises EngineMissing where the kernel is asked for and
    cannot run.
    """
    assert tensors.device.type == "cuda" and tensors.cpu_blocks, "there is no link to measure"
    key = _key(tensors, way)
    known = _decided.get(key)
    if known is not None and _still_copies(known, tensors):
        return known
    kernel, missing = _find_kernel(tensors, way)
    if kernel is None and way == "kernel":
        raise EngineMissing(f"hardware.copies=kernel: {missing}; use hardware.copies=auto.")
    engines, lacking = _find_engines()
    stopwatch = CudaStopwatch(tensors.device, tensors.dtype)
    copying = decide_copying(tensors, way, engines, kernel, missing, stopwatch)
    copying = replace(copying, note="; ".join(filter(None, (copying.note, lacking))))
    _log.info("Copies between the tiers: %s", copying.note)
    _decided[key] = copying
    return copying


def _key(tensors: KvTensors, way: CopyWay) -> _Key:
    fewest = min(tensors.gpu_blocks, tensors.cpu_blocks)
    samples = tuple(samples_of(fewest, tensors.layer_block_bytes))
    whole = tensors.gpu_blocks if way == "kernel" else None  # how long a run the kernel takes there
    return tensors.device, tensors.dtype, tensors.layer_block_bytes, tensors.layers, way, samples, whole


def _still_copies(copying: Copying, tensors: KvTensors) -> bool:
    ways = ((copying.inward, tensors.cpu, tensors.gpu), (copying.outward, tensors.gpu, tensors.cpu))
    try:
        return not any(find_fault(copier, source, target) for copier, source, target in ways)
    finally:
        zero_samples(tensors.cpu, tensors.gpu)


def decide_copying(
    tensors: KvTensors,
    way: CopyWay,
    engines: Sequence[Copier],
    kernel: Copier | None,
    missing: str,
    stopwatch: Stopwatch,
) -> Copying:
    """engines: the ways to use copy engines, the last resort first. missing: why there is no kernel."""
    chosen: list[Copier] = []
    notes: list[str] = []
    figures: dict[str, dict[str, float]] = {}
    for direction, source, target in (("in", tensors.cpu, tensors.gpu), ("out", tensors.gpu, tensors.cpu)):
        samples = samples_of(min(source.shape[1], target.shape[1]), tensors.layer_block_bytes)
        candidates = [*engines, *([] if kernel is None else [kernel])]
        try:
            wrong = {c.name: why for c in candidates if (why := find_fault(c, source, target))}
            usable = [c for c in candidates if c.name not in wrong]
            took = measure(usable, source, target, samples, stopwatch)
        finally:
            zero_samples(source, target)
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


def limits_of(dma: Mapping[Sample, Took], kernel: Mapping[Sample, Took], samples: Sequence[Sample]) -> Limits:
    """Start at the largest sample of single blocks; extend to longer runs, and to fewer runs, while the kernel wins."""

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


def _find_engines() -> tuple[list[Copier], str]:
    """The ways to use copy engines, the last resort first, and why there are no more."""
    try:
        return [CallCopier(), BatchCopier()], ""
    except EngineMissing as error:
        return [CallCopier()], str(error).rstrip(".")


def _find_kernel(tensors: KvTensors, way: CopyWay) -> tuple[Copier | None, str]:
    """The kernel, or why there is none."""
    if way == "dma":
        return None, ""
    if importlib.util.find_spec("triton") is None:
        return None, "it needs the package triton (pip install 'pensieve-lab[triton]')"
    if tensors.layer_block_bytes % WORD_BYTES:
        return None, f"a block of {tensors.layer_block_bytes} bytes a layer is no multiple of {WORD_BYTES}"
    return KernelCopier(), ""


def _words(sample: Sample, layer_block_bytes: int) -> str:
    return f"{sample.runs} x {sample.blocks * layer_block_bytes / 1024:g} KiB"
