"""The kernels compiled for GPUs that this machine need not have: what the interpreter cannot find."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from .conftest import INTERPRETED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(INTERPRETED, reason="Triton interprets in this process, and compiles nothing"),
    pytest.mark.skipif(
        find_spec("triton") is None, reason="the extra triton is not installed: pip install 'pensieve[triton]'"
    ),
]
POINTERS = {
    "partial_ptr": "*fp32",
    "weight_ptr": "*fp32",
    "items_ptr": "*i32",
    "tables_ptr": "*i32",
    "joins_ptr": "*i32",
}
POINTERS |= {"slots_ptr": "*i64"}


@pytest.mark.parametrize(
    ("architecture", "shared", "dim", "large"),
    [(90, 232448, 128, True), (80, 166912, 80, False), (86, 101376, 128, False)],
    ids=str,
)
def test_compiles_within_the_shared_memory_it_was_given(
    architecture: int, shared: int, dim: int, large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pensieve.worker.torch.kernels.paged import attend_kernel, join_kernel, write_kernel
    from pensieve.worker.torch.kernels.triton_backend import tiles_for

    major = architecture // 10
    tiles = tiles_for(128, 2, 16, large, shared, major)
    sizes = {"HEADS": 32, "GROUP": 4, "SOFTCAP": False, "WINDOW": 0, "CHUNK": 32, "HEAD_DIM": dim, "PADDED_DIM": 128}
    sizes |= {"SMALL_M": 16, "LARGE_M": max(16, tiles.large_rows), "BLOCK_N": tiles.block_keys, "DOT": tl.bfloat16}
    sizes |= {"HAS_LARGE": large, "BLOCK_S": 16, "KV_HEADS": 8, "PADDED": 1024}
    limits = {
        attend_kernel: tiles.shared_bytes(128, 2, max(16, tiles.large_rows), major),
        join_kernel: shared,
        write_kernel: shared,
    }
    for kernel, limit in limits.items():
        signature = {}
        for name in kernel.arg_names:
            pointer = POINTERS.get(name, "*bf16") if name.endswith("_ptr") else None
            number = "fp32" if name.endswith("_scale") else "i32"
            signature[name] = "constexpr" if name in sizes else pointer or number
        constants = {(index,): sizes[name] for index, name in enumerate(kernel.arg_names) if name in sizes}
        aligned = {
            (i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if signature[n] in ("i32", "*bf16")
        }
        built = triton.compile(
            ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned),
            target=GPUTarget("cuda", architecture, 32),
            options={"num_warps": tiles.warps, "num_stages": tiles.stages, "enable_fp_fusion": True},
        )
        assert built.metadata.shared <= limit <= shared
        assert ("cp.async" in built.asm["ptx"]) == (kernel is attend_kernel), "keys are copied while others are used"
        if kernel is attend_kernel:
            _assert_pipelined(built.asm["ttgir"])


def _assert_pipelined(ttgir: str) -> None:
    """K and V have two buffers or more each, and a step waits for its own copies while the next one's two are under way."""
    buffers = set(re.findall(r"local_alloc : \(\) -> !ttg.memdesc<(\d+)x\d+x\d+xbf16", ttgir))
    waits = {int(number) for number in re.findall(r"async_wait[^\n]*num = (\d+)", ttgir)}
    assert min(map(int, buffers)) >= 2 and 2 in waits, (buffers, waits)


@pytest.mark.parametrize("kibibytes", [99, 163, 227])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_fit_the_device(itemsize: int, kibibytes: int) -> None:
    from pensieve.worker.torch.kernels.triton_backend import tiles_for

    for dim in (16, 64, 128, 256):
        for large in (False, True):
            tiles = tiles_for(dim, itemsize, 16, large, kibibytes * 1024)
            assert tiles.shared_bytes(dim, itemsize, max(16, tiles.large_rows)) <= kibibytes * 1024
            assert (tiles.large_rows >= 32) == large
            assert tiles.stages > 1 or dim == 256, "keys are copied ahead, but for the largest heads"


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("layer_block_bytes", [131072, 4096, 8640], ids=str)
def test_blocks_are_copied_in_accesses_of_16_bytes(
    architecture: int, layer_block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a mask ends the block (8,640 bytes: 540 words): a scalar access would be a quarter of the width."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pensieve.worker.torch.kernels.block_copy import copy_blocks_kernel
    from pensieve.worker.torch.transfers.copies import tile_of

    elements = layer_block_bytes // 4
    signature = {"source_ptr": "*i32", "target_ptr": "*i32", "pairs_ptr": "*i32", "tiles": "i32"}
    signature |= {"ELEMENTS": "constexpr", "TILE": "constexpr"}
    built = triton.compile(
        ASTSource(
            fn=copy_blocks_kernel,
            signature=signature,
            constexprs={(4,): elements, (5,): tile_of(elements)},
            attrs={(i,): [["tt.divisibility", 16]] for i in range(3)},
        ),
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": 8, "enable_fp_fusion": True},
    )
    accesses = [line for line in built.asm["ptx"].splitlines() if "ld.global" in line or "st.global" in line]
    moved = [line for line in accesses if ".v4." in line]
    tables = [line for line in accesses if ".v4." not in line]
    assert len(tables) == 2, "the two numbers of a pair, and nothing else in narrow accesses"
    assert sum("ld.global.cg.v4.b32" in line for line in moved) == sum("st.global.v4.b32" in line for line in moved) > 0
    assert "cp.async" not in built.asm["ptx"] and built.metadata.shared == 0
