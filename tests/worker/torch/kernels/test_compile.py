"""The kernels compiled for GPUs that this machine need not have: what the interpreter cannot find."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from pensieve.lab.bench.kernel_code import KNOWN, attention_code, compiled

from .conftest import INTERPRETED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(INTERPRETED, reason="Triton interprets in this process, and compiles nothing"),
    pytest.mark.skipif(
        find_spec("triton") is None, reason="the extra triton is not installed: pip install 'pensieve-lab[triton]'"
    ),
]


@pytest.mark.parametrize(
    ("architecture", "large", "dim", "products"),
    [
        (80, False, 80, "mma"), (86, False, 128, "mma"), (89, False, 128, "mma"), (90, False, 128, "mma"),
        (100, False, 128, "mma"), (80, True, 128, "mma"), (90, True, 128, "wgmma"),
    ],
    ids=str,
)  # fmt: skip
def test_the_attention_kernel_becomes_what_its_tiles_promise(
    architecture: int, large: bool, dim: int, products: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No register is spilled; K and V have two buffers each, and a step waits for its own copies alone while the next one's
    two are under way; large tiles are 128 rows, whose products read shared memory where the GPU can."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    code = attention_code(architecture, large, dim, descriptors=False)
    most = KNOWN[architecture].shared_a_program
    assert code.stack_bytes == 0 and code.registers <= 255
    assert code.shared_bytes <= code.predicted_bytes <= most
    assert code.predicted_bytes - code.shared_bytes <= (code.large_rows or 16) * code.block_keys * 2, (
        "the weights at most"
    )
    assert code.buffers >= 2 and 2 in code.waits
    assert "cp.async" in code.ptx
    assert products in code.products
    assert (code.large_rows, code.warps) == ((128, 8) if large else (0, 4))
    assert code.programs == code.expected_programs >= (1 if large else 2)


@pytest.mark.parametrize(("architecture", "dim", "products"), [(90, 128, "wgmma"), (100, 128, "tcgen05")])
def test_prompts_fetch_boxes_where_the_gpu_has_them(
    architecture: int, dim: int, products: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the tensor memory accelerator, ahead of their step; no register is spilled, and two programs of 8 warps share a
    multiprocessor, where with pointers it is one."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    code = attention_code(architecture, True, dim)
    assert code.boxed and (code.large_rows, code.block_keys, code.warps) == (128, 32, 8)
    assert code.stack_bytes == 0 and code.registers <= 128 and code.programs == code.expected_programs == 2
    assert code.shared_bytes <= code.predicted_bytes <= KNOWN[architecture].shared_a_program
    assert code.buffers >= 2 and "async_tma_copy_global_to_local" in code.ttgir
    assert "cp.async.bulk.tensor" in code.ptx and products in code.products
    assert "cp.async.ca" not in code.ptx and "cp.async.cg" not in code.ptx, "what is masked has no pipeline of its own"


def test_decode_rows_are_loaded_by_pointers_everywhere() -> None:
    from pensieve.device.kernels.triton_backend import tiles_for

    for architecture, machine in KNOWN.items():
        tiles = [
            tiles_for(128, 2, 16, large, machine.shared_a_program, architecture // 10, boxes=True)
            for large in (False, True)
        ]
        assert [one.boxed for one in tiles] == [False, True]


@pytest.mark.parametrize(
    ("changed", "fit"),
    [
        ({}, True), ({"capability": 10}, True), ({"chunk_tokens": 128}, True), ({"head_dim": 80}, True),
        ({"capability": 8}, False), ({"capability": 12}, False), ({"itemsize": 4}, False), ({"chunk_tokens": 16}, False),
        ({"head_dim": 84}, False), ({"window": 4096}, False),
    ],
    ids=str,
)  # fmt: skip
def test_boxes_fit(changed: dict[str, int], fit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from pensieve.device.kernels import triton_backend

    case = {"capability": 9, "itemsize": 2, "head_dim": 128, "chunk_tokens": 32, "window": None, **changed}
    assert triton_backend.boxes_fit(**case) is fit
    monkeypatch.setattr(triton_backend, "TensorDescriptor", None)
    assert not triton_backend.boxes_fit(**case), "an older Triton has none"


@pytest.mark.parametrize("architecture", [80, 90])
def test_the_small_kernels_compile_without_shared_copies(
    architecture: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from pensieve.device.kernels.paged import join_kernel, write_kernel

    options = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
    join = compiled(join_kernel, architecture, options, HEADS=32, HEAD_DIM=128, PADDED_DIM=128, BLOCK_S=16)
    write = compiled(write_kernel, architecture, options, KV_HEADS=8, HEAD_DIM=128, PADDED=1024)
    for built in (join, write):
        assert built.metadata.shared <= KNOWN[architecture].shared_a_program and "cp.async" not in built.asm["ptx"]


@pytest.mark.parametrize("kibibytes", [99, 163, 227])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_fit_the_device(itemsize: int, kibibytes: int) -> None:
    from pensieve.device.kernels.triton_backend import tiles_for

    for dim in (16, 64, 128, 256):
        for large in (False, True):
            tiles = tiles_for(dim, itemsize, 16, large, kibibytes * 1024)
            assert tiles.shared_bytes(dim, itemsize, max(16, tiles.large_rows)) <= kibibytes * 1024
            assert (tiles.large_rows >= 32) == large
            assert tiles.stages > 1 or dim == 256, "keys are copied ahead, but for the largest heads"
            assert tiles.stages == 3 or dim == 256 or itemsize == 4, "two steps ahead, also in 99 KiB"


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("large", [False, True])
def test_consumer_blackwell_has_the_tiles_of_ada(large: bool, dim: int) -> None:
    """It has Ada's shared memory and no wgmma; a tile of 64 rows that keeps its stages has one for heads of 256."""
    from pensieve.device.kernels.triton_backend import tiles_for

    ada, blackwell, hopper = (tiles_for(dim, 2, 16, large, 99 * 1024, capability) for capability in (8, 12, 9))
    assert ada == blackwell and (not large or dim < 256 or ada.stages == 2)
    assert not large or dim < 256 or hopper != ada, "the other way round, so that this can fail"
