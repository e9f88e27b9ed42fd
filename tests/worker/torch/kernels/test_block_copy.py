"""The copy kernel in Triton's interpreter against index copies; see conftest.py for how these are run."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from pensieve.specs import ModelSpec
from pensieve.worker.block_runs import BlockRun
from pensieve.worker.torch.kv_tensors import KvTensors
from pensieve.worker.torch.transfers.choice import decide_copying
from pensieve.worker.torch.transfers.copies import CallCopier, KernelCopier
from pensieve.worker.torch.transfers.link import Copier, Haul
from pensieve.worker.torch.transfers.measurement import Took

LAYERS, BLOCKS = 3, 40


def pool(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bytes, NaN patterns included."""
    size = torch.empty(0, dtype=dtype).itemsize
    for length in shape:
        size *= length
    return torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).view(shape)


def scattered(seed: int) -> list[BlockRun]:
    """Runs of 1 to 4 blocks, neither in the same order nor adjacent in both pools."""
    chance = random.Random(seed)
    starts = chance.sample(range(0, BLOCKS, 5), 6)
    targets = chance.sample(range(0, BLOCKS, 4), 6)
    return [BlockRun(src, dst, chance.randint(1, 4)) for src, dst in zip(starts, targets, strict=True)]


@pytest.mark.parametrize(
    ("tokens", "kv_heads", "dim", "dtype"),
    [
        (4, 2, 16, torch.float32),  # 1 KiB: a tile a block
        (32, 1, 64, torch.bfloat16),
        (3, 1, 4, torch.float16),  # 48 bytes: three words, the tile is masked
        (5, 3, 72, torch.float32),  # 8,640 bytes: a power of two of nothing
        (32, 8, 72, torch.float16),  # 72 KiB: two tiles and a part of one
    ],
    ids=str,
)
def test_every_block_arrives_and_no_other_changes(tokens: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    shape = (LAYERS, BLOCKS, tokens, 2, kv_heads, dim)
    source, target = pool(shape, dtype), pool(shape, dtype)
    runs = scattered(dim)
    expected = target.view(torch.uint8).clone()
    for run in runs:
        for block in range(run.blocks):
            expected[:, run.dst + block] = source.view(torch.uint8)[:, run.src + block]
    copy = KernelCopier(programs=3).prepare(Haul(runs, source, target))
    for layer in range(LAYERS):
        assert not torch.equal(target.view(torch.uint8)[layer], expected[layer])
        copy(layer)
        assert torch.equal(target.view(torch.uint8)[layer], expected[layer])


def test_more_programs_than_there_is_work_for() -> None:
    source, target = (pool((1, BLOCKS, 2, 2, 1, 4), torch.float32) for _ in range(2))
    copy = KernelCopier().prepare(Haul([BlockRun(7, 30, 1)], source, target))
    copy(0)
    assert torch.equal(target.view(torch.uint8)[0, 30], source.view(torch.uint8)[0, 7])


def test_offsets_are_wider_than_32_bits() -> None:
    """The last blocks of pools of 2^31 elements and more, which are mapped and never touched elsewhere."""
    import numpy as np

    blocks, elements = 2**18 + 2, 2**13
    source, target = (
        torch.from_numpy(np.zeros((1, blocks, elements), dtype=np.int32)).view(1, blocks, elements, 1, 1, 1)
        for _ in range(2)
    )
    source[0, blocks - 1] = 5
    KernelCopier().prepare(Haul([BlockRun(blocks - 1, blocks - 2, 1)], source, target))(0)
    assert (target[0, blocks - 2] == 5).all()
    assert not target[0, blocks - 1].any() and not target[0, 0].any()


def test_it_passes_the_check_that_every_way_of_copying_must_pass() -> None:
    """And a kernel that is sent to wrong blocks does not."""
    spec = ModelSpec("toy", "llama", 3, 64, 4, 2, 16, 128, 97, 512)
    tensors = KvTensors(spec, 8, BLOCKS, BLOCKS, torch.device("cpu"), torch.bfloat16)

    def stopwatch(copier: Copier, haul: Haul) -> Took:
        copier.prepare(haul)(0)
        return Took(1e-6, 1e-6 if copier.name == "kernel" else 2e-6)

    copying = decide_copying(tensors, "auto", [CallCopier()], KernelCopier(), "", stopwatch)
    assert copying.inward.name.startswith("kernel") and copying.outward.name.startswith("kernel")
    assert not tensors.gpu.any() and not tensors.cpu.any()

    class Astray(KernelCopier):
        def prepare(self, haul: Haul) -> Callable[[int], None]:
            return super().prepare(replace(haul, runs=[replace(run, src=run.src + 1) for run in haul.runs]))

    copying = decide_copying(tensors, "auto", [CallCopier()], Astray(), "", stopwatch)
    assert "not kernel: it copied wrongly" in copying.note and copying.inward.name == "dma, a call a run"
