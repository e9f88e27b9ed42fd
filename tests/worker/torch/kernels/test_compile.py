"""The kernels compiled for GPUs that this machine need not have: what the interpreter cannot find.

Nothing is timed: registers, shared memory and what shares a multiprocessor bound a kernel, and say nothing of its speed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from .conftest import INTERPRETED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(INTERPRETED, reason="Triton interprets in this process, and compiles nothing"),
    pytest.mark.skipif(
        find_spec("triton") is None, reason="the extra triton is not installed: pip install 'pensieve-lab[triton]'"
    ),
]


_WARP, _REGISTER_UNIT = 32, 256  # threads of a warp; it is given registers in whole units
_CHUNK, _GROUP, _KV_HEADS, _SMALL_ROWS = 32, 4, 8, 16
_POINTERS = {
    "partial_ptr": "*fp32", "weight_ptr": "*fp32", "items_ptr": "*i32", "tables_ptr": "*i32", "joins_ptr": "*i32",
    "places_ptr": "*i64",
}  # fmt: skip


PRODUCTS = {"mma": "mma.sync", "wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma"}


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What programs share: 32-bit registers, bytes of shared memory, threads. shared_a_program: the most one may have."""

    registers: int
    shared_bytes: int
    threads: int
    shared_a_program: int


KNOWN = {
    80: Multiprocessor(65536, 164 * 1024, 2048, 163 * 1024),
    86: Multiprocessor(65536, 100 * 1024, 1536, 99 * 1024),
    89: Multiprocessor(65536, 100 * 1024, 1536, 99 * 1024),
    90: Multiprocessor(65536, 228 * 1024, 2048, 227 * 1024),
    100: Multiprocessor(65536, 228 * 1024, 2048, 227 * 1024),
}
"""By architecture (CUDA C++ Programming Guide, technical specifications by compute capability)."""


def resident(registers, shared_bytes, warps, on):
    """Programs on a multiprocessor at once, by NVIDIA's occupancy rules; registers: of a thread. 0 where not one fits."""
    from pensieve.device.kernels.triton_backend import RESERVED_SHARED

    units = -(-registers * _WARP // _REGISTER_UNIT)
    by_registers = on.registers // (units * _REGISTER_UNIT * warps)
    by_shared = on.shared_bytes // (shared_bytes + RESERVED_SHARED)
    return min(by_registers, by_shared, on.threads // (warps * _WARP))


def attention_code(architecture, large, head_dim, descriptors=True):
    """The attention kernel with the tiles that a device of this architecture gets, compiled with bfloat16. Needs triton, not
    interpreted.

    predicted_bytes: of shared memory, by Tiles.shared_bytes. stack_bytes: of a thread; spilled registers go there. buffers:
    of K and of V, each; waits: copies that may be under way when a step goes on; neither is read where steps come in boxes.
    products: mma (registers), wgmma (shared memory), tcgen05 (sm_100). programs: on a multiprocessor; expected_programs: by
    Tiles.programs, which work is cut by.
    """
    from pensieve.device.kernels.paged import attend_kernel
    from pensieve.device.kernels.triton_backend import boxes_fit, tiles_for

    padded, major, machine = 128, architecture // 10, KNOWN[architecture]
    boxes = descriptors and boxes_fit(major, 2, head_dim, _CHUNK, None)
    tiles = tiles_for(padded, 2, _SMALL_ROWS, large, machine.shared_a_program, major, boxes)
    rows = max(_SMALL_ROWS, tiles.large_rows)
    built = compiled(
        attend_kernel,
        architecture,
        tiles.options,
        boxes=f"tensordesc<bf16[{tiles.block_keys}, 1, {padded}]>" if tiles.boxed else None,
        HEADS=_GROUP * _KV_HEADS, GROUP=_GROUP, SOFTCAP=False, WINDOW=0, CHUNK=_CHUNK, HEAD_DIM=head_dim,
        PADDED_DIM=padded, SMALL_M=_SMALL_ROWS, LARGE_M=rows, BLOCK_N=tiles.block_keys, HAS_LARGE=large,
    )  # fmt: skip
    registers, stack = _resources(built.asm["cubin"])
    ttgir, ptx = built.asm["ttgir"], built.asm["ptx"]
    buffers = [int(n) for n in re.findall(r"local_alloc : \(\) -> !ttg.memdesc<(\d+)x[\dx]+x\d+xbf16", ttgir)]
    return SimpleNamespace(
        boxed=tiles.boxed, large_rows=tiles.large_rows, block_keys=tiles.block_keys, warps=tiles.warps, registers=registers,
        stack_bytes=stack, shared_bytes=int(built.metadata.shared),
        predicted_bytes=tiles.shared_bytes(padded, 2, rows, major),
        buffers=min(buffers, default=1),
        waits={int(n) for n in re.findall(r"async_wait[^\n]*num = (\d+)", ttgir)},
        products={name for name, instruction in PRODUCTS.items() if instruction in ptx},
        programs=resident(registers, int(built.metadata.shared), tiles.warps, machine),
        expected_programs=tiles.programs(padded, 2, rows, major, machine.shared_a_program),
        ttgir=ttgir, ptx=ptx,
    )  # fmt: skip


def compiled(kernel, architecture, options, boxes=None, **constants):
    """A kernel of kernels.paged as Triton compiles it for aligned pointers and strides. DOT is bfloat16.

    boxes: the type of the descriptor that the launch brings.
    """
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    sizes = {**constants, "DOT": tl.bfloat16, **({} if boxes else {"boxes": None})}
    signature = {}
    for name in kernel.arg_names:
        pointer = _POINTERS.get(name, "*bf16") if name.endswith("_ptr") else boxes if name == "boxes" else None
        number = "fp32" if name.endswith("_scale") else "i32"
        signature[name] = "constexpr" if name in sizes else pointer or number
    names = list(enumerate(kernel.arg_names))
    return triton.compile(
        ASTSource(
            fn=kernel,
            signature=signature,
            constexprs={(index,): sizes[name] for index, name in names if name in sizes},
            attrs={(i,): [["tt.divisibility", 16]] for i, name in names if signature[name][0] in "i*"},
        ),
        target=GPUTarget("cuda", architecture, 32),
        options=dict(options),
    )


def _resources(cubin):
    """Registers and bytes of stack of a thread, as NVIDIA's tool that comes with Triton reads them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])


@pytest.mark.parametrize(
    ("architecture", "large", "dim", "products"),
    [
        (80, False, 80, "mma"), (86, False, 128, "mma"), (89, False, 128, "mma"), (90, False, 128, "mma"),
        (100, False, 128, "mma"), (80, True, 128, "mma"), (90, True, 128, "wgmma"),
    ],
    ids=str,
)  # fmt: skip
def test_the_attention_kernel_becomes_what_its_tiles_promise(architecture, large, dim, products, tmp_path, monkeypatch):
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
def test_prompts_fetch_boxes_where_the_gpu_has_them(architecture, dim, products, tmp_path, monkeypatch):
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


@pytest.mark.parametrize(
    ("changed", "fit"),
    [
        ({}, True), ({"capability": 10}, True), ({"chunk_tokens": 128}, True), ({"head_dim": 80}, True),
        ({"capability": 8}, False), ({"capability": 12}, False), ({"itemsize": 4}, False), ({"chunk_tokens": 16}, False),
        ({"head_dim": 84}, False), ({"window": 4096}, False),
    ],
    ids=str,
)  # fmt: skip
def test_boxes_fit(changed, fit, monkeypatch):
    from pensieve.device.kernels import triton_backend

    case = {"capability": 9, "itemsize": 2, "head_dim": 128, "chunk_tokens": 32, "window": None, **changed}
    assert triton_backend.boxes_fit(**case) is fit
    monkeypatch.setattr(triton_backend, "TensorDescriptor", None)
    assert not triton_backend.boxes_fit(**case), "an older Triton has none"


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
