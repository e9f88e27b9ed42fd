"""What Triton makes of the paged attention kernel for GPUs that this machine need not have, as a table:

    python -m pensieve.lab.bench.kernel_code [80 86 89 90 100]

Nothing is timed: registers, shared memory and what shares a multiprocessor bound a kernel, and say nothing of its speed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WARP, _REGISTER_UNIT = 32, 256  # threads of a warp; it is given registers in whole units
_CHUNK, _HEAD_DIM, _GROUP, _KV_HEADS, _SMALL_ROWS = 32, 128, 4, 8, 16
_POINTERS = {
    "partial_ptr": "*fp32", "weight_ptr": "*fp32", "items_ptr": "*i32", "tables_ptr": "*i32", "joins_ptr": "*i32",
    "places_ptr": "*i64",
}  # fmt: skip
COLUMNS = (
    "GPU", "launch", "keys by", "tile", "warps", "stages", "registers", "stack", "shared", "predicted", "buffers", "waits",
    "products", "programs", "warps an SM",
)  # fmt: skip


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


def resident(registers: int, shared_bytes: int, warps: int, on: Multiprocessor) -> int:
    """Programs on a multiprocessor at once, by NVIDIA's occupancy rules; registers: of a thread. 0 where not one fits."""
    from pensieve.device.kernels.triton_backend import RESERVED_SHARED

    units = -(-registers * _WARP // _REGISTER_UNIT)
    by_registers = on.registers // (units * _REGISTER_UNIT * warps)
    by_shared = on.shared_bytes // (shared_bytes + RESERVED_SHARED)
    return min(by_registers, by_shared, on.threads // (warps * _WARP))


@dataclass(frozen=True, slots=True)
class Code:
    """A kernel compiled for an architecture, with bfloat16. predicted_bytes: of shared memory, by Tiles.shared_bytes.

    stack_bytes: of a thread; spilled registers go there. buffers: of K and of V, each; waits: copies that may be under way
    when a step goes on; neither is read where steps come in boxes. products: mma (registers), wgmma (shared memory), tcgen05
    (sm_100). programs: on a multiprocessor; expected_programs: by Tiles.programs, which work is cut by.
    """

    architecture: int
    boxed: bool
    large_rows: int
    block_keys: int
    warps: int
    stages: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    predicted_bytes: int
    buffers: int
    waits: frozenset[int]
    products: frozenset[str]
    programs: int
    expected_programs: int
    ttgir: str
    ptx: str


def attention_code(architecture: int, large: bool, head_dim: int = _HEAD_DIM, descriptors: bool = True) -> Code:
    """The attention kernel with the tiles that a device of this architecture gets. Needs triton, not interpreted."""
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
    return Code(
        architecture, tiles.boxed, tiles.large_rows, tiles.block_keys, tiles.warps, tiles.stages, registers, stack,
        shared_bytes=int(built.metadata.shared),
        predicted_bytes=tiles.shared_bytes(padded, 2, rows, major),
        buffers=min(buffers, default=1),
        waits=frozenset(int(n) for n in re.findall(r"async_wait[^\n]*num = (\d+)", ttgir)),
        products=frozenset(_products(ptx)),
        programs=resident(registers, int(built.metadata.shared), tiles.warps, machine),
        expected_programs=tiles.programs(padded, 2, rows, major, machine.shared_a_program),
        ttgir=ttgir,
        ptx=ptx,
    )  # fmt: skip


def compiled(
    kernel: Any, architecture: int, options: Mapping[str, Any], boxes: str | None = None, **constants: Any
) -> Any:
    """A kernel of kernels.paged as Triton compiles it for aligned pointers and strides. DOT is bfloat16.

    boxes: the type of the descriptor that the launch brings.
    """
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    sizes = {**constants, "DOT": tl.bfloat16, **({} if boxes else {"boxes": None})}
    signature: dict[str, str] = {}
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


def _resources(cubin: bytes) -> tuple[int, int]:
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


def _products(ptx: str) -> Iterator[str]:
    for name, instruction in (("mma", "mma.sync"), ("wgmma", "wgmma.mma_async"), ("tcgen05", "tcgen05.mma")):
        if instruction in ptx:
            yield name


def row(code: Code) -> str:
    tile = f"{_SMALL_ROWS} x {code.block_keys}" + (
        f", {code.large_rows} x {code.block_keys}" if code.large_rows else ""
    )
    kib = (f"{size / 1024:.0f} KiB" for size in (code.shared_bytes, code.predicted_bytes))
    cells = [
        f"sm_{code.architecture}", "with prompts" if code.large_rows else "decode rows",
        "boxes" if code.boxed else "pointers", tile, code.warps, code.stages,
        code.registers, code.stack_bytes, *kib, code.buffers, ", ".join(map(str, sorted(code.waits))),
        ", ".join(sorted(code.products)), code.programs, code.programs * code.warps,
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def main(architectures: Sequence[int]) -> None:
    print(f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS), sep="\n", flush=True)
    for architecture in architectures or sorted(KNOWN):
        for large, descriptors in ((False, True), (True, False), (True, True)):
            code = attention_code(architecture, large, descriptors=descriptors)
            if code.boxed or not large or not descriptors:  # else it is the one before
                print(row(code), flush=True)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
