"""The kernels in Triton's interpreter, and compiled for GPUs that this machine need not have. Nothing is timed: registers,
shared memory and what shares a multiprocessor bound a kernel, and say nothing of its speed."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from .conftest import INTERPRETED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(INTERPRETED, reason="Triton interprets in this process"),
    pytest.mark.skipif(
        find_spec("triton") is None, reason="the extra triton is not installed: pip install 'pensieve-lab[triton]'"
    ),
]


def test_the_kernel_in_tritons_interpreter() -> None:
    """All of this folder: TRITON_INTERPRET=1 pytest tests/worker/torch/kernels does it by hand."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-v", "-p", "no:cacheprovider", "test_attend.py", "test_paged.py"],
        cwd=Path(__file__).parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


_CHUNK, _GROUP, _KV_HEADS, _SMALL_ROWS, _PADDED = 32, 4, 8, 16, 128
_TYPES = {
    "partial_ptr": "*fp32", "weight_ptr": "*fp32", "items_ptr": "*i32", "tables_ptr": "*i32", "in_scale": "fp32",
    "out_scale": "fp32",
}  # fmt: skip
KIBIBYTES = {80: 163, 90: 227}
"""Of shared memory, that a program may have (CUDA C++ Programming Guide, technical specifications by compute capability)."""


def compiled(architecture, tiles, head_dim, large):
    """The attention kernel as Triton compiles it for aligned pointers and strides, with a bfloat16 pool."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pensieve.device.kernels.paged import attend_kernel

    sizes = {
        "HEADS": _GROUP * _KV_HEADS, "GROUP": _GROUP, "SOFTCAP": False, "WINDOW": 0, "CHUNK": _CHUNK, "HEAD_DIM": head_dim,
        "PADDED_DIM": _PADDED, "SMALL_M": _SMALL_ROWS, "LARGE_M": max(_SMALL_ROWS, tiles.large_rows),
        "BLOCK_N": tiles.block_keys, "HAS_LARGE": large, "DOT": tl.bfloat16,
    }  # fmt: skip
    names = attend_kernel.arg_names
    signature = {
        name: "constexpr" if name in sizes
        else _TYPES.get(name, "*bf16" if name.endswith("_ptr") else "i32")
        for name in names
    }  # fmt: skip
    source = ASTSource(
        fn=attend_kernel,
        signature=signature,
        constexprs={(at,): sizes[name] for at, name in enumerate(names) if name in sizes},
        attrs={(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if signature[name][0] in "i*"},
    )
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=dict(tiles.options))


def registers_and_stack(cubin, folder):
    """Of a thread, as NVIDIA's tool that comes with Triton reads them; spilled registers go to the stack."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    (folder / "kernel.cubin").write_bytes(cubin)
    said = subprocess.run(
        [tool, "-res-usage", folder / "kernel.cubin"], capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])


@pytest.mark.parametrize(
    ("architecture", "large", "dim", "products"), [(80, False, 80, "mma.sync"), (90, True, 128, "wgmma.mma_async")]
)
def test_the_attention_kernel_becomes_what_its_tiles_promise(architecture, large, dim, products, tmp_path, monkeypatch):
    """No register is spilled; large tiles are 128 rows, whose products read shared memory where the GPU can. A step waits for
    its own copies alone while the next one's two are under way."""
    from pensieve.device.kernels.triton_backend import tiles_for

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    major, most = architecture // 10, KIBIBYTES[architecture] * 1024
    tiles = tiles_for(_PADDED, 2, _SMALL_ROWS, large, most, major)
    rows = max(_SMALL_ROWS, tiles.large_rows)
    built = compiled(architecture, tiles, dim, large)
    ttgir, ptx, shared = built.asm["ttgir"], built.asm["ptx"], int(built.metadata.shared)
    registers, stack = registers_and_stack(built.asm["cubin"], tmp_path)
    predicted = tiles.shared_bytes(_PADDED, 2, rows, major)
    assert (tiles.large_rows, tiles.warps) == ((128, 8) if large else (0, 4))
    assert stack == 0 and registers <= 255
    assert shared <= predicted <= most
    assert predicted - shared <= rows * tiles.block_keys * 2, "the weights at most"
    assert 2 in {int(n) for n in re.findall(r"async_wait[^\n]*num = (\d+)", ttgir)} and "cp.async" in ptx
    assert products in ptx


@pytest.mark.parametrize("kibibytes", [99, 163, 227])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_fit_the_device(itemsize, kibibytes):
    from pensieve.device.kernels.triton_backend import tiles_for

    for dim in (16, 64, 128, 256):
        for large in (False, True):
            tiles = tiles_for(dim, itemsize, 16, large, kibibytes * 1024)
            assert tiles.shared_bytes(dim, itemsize, max(16, tiles.large_rows)) <= kibibytes * 1024
            assert (tiles.large_rows >= 32) == large
            assert tiles.stages > 1 or dim == 256, "keys are copied ahead, but for the largest heads"
            assert tiles.stages == 3 or dim == 256 or itemsize == 4, "two steps ahead, also in 99 KiB"
