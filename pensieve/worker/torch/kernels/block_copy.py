"""The copy kernel in Triton: scattered blocks of one layer between pinned memory and the GPU's, in one launch.

Pinned memory has an address on the device (Triton's launcher asks the driver for it), so that the kernel reads and writes it
directly over the link.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tiles"])
def copy_blocks_kernel(source_ptr, target_ptr, pairs_ptr, tiles, ELEMENTS: tl.constexpr, TILE: tl.constexpr):
    """Blocks of ELEMENTS int32 from pairs[i, 0] of source to pairs[i, 1] of target, in pieces of TILE; `tiles` of all blocks.

    Programs take tiles in turn, so that those under way lie beside each other. ELEMENTS is a constant, which tells the
    compiler that a mask never splits 16 bytes. Offsets are 64-bit, for pools of more than 2^31 elements.
    """
    tiles_a_block = (ELEMENTS + TILE - 1) // TILE
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        pair = tile // tiles_a_block
        at = (tile % tiles_a_block) * TILE + tl.arange(0, TILE)
        source = tl.load(pairs_ptr + 2 * pair).to(tl.int64) * ELEMENTS
        target = tl.load(pairs_ptr + 2 * pair + 1).to(tl.int64) * ELEMENTS
        if ELEMENTS % TILE == 0:
            values = tl.load(source_ptr + source + at, cache_modifier=".cg")  # read once: not through the first cache
            tl.store(target_ptr + target + at, values)
        else:
            inside = at < ELEMENTS
            values = tl.load(source_ptr + source + at, mask=inside, cache_modifier=".cg")
            tl.store(target_ptr + target + at, values, mask=inside)
