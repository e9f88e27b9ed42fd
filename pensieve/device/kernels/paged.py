"""The paged attention kernel in Triton: decode, append and prefill rows of one ragged batch in one launch.

A program does one work item (see work_list) for one KV head. The queries of the head's group are packed into the rows of
its tile: row m is query m // GROUP, head m % GROUP. Keys are walked in steps of BLOCK_N positions, whose places come from
the block table, so blocks may have any power of two of tokens. Softmax is online, in base 2 and float32.

No lane reads what may never have been written: positions beyond the split are masked to 0 in memory and to -inf in the
scores, since 0 x NaN is NaN. Offsets into the pool are 64-bit, for pools of more than 2^31 elements.
"""

# ruff: noqa: SIM102 (an `if` on a constexpr is decided when the kernel is compiled, if nothing else is in it)

import triton
import triton.language as tl


@triton.jit
def _weigh(scores, top):
    """One step of the online softmax: weights of the step's keys, what the earlier result decays by, and the new top."""
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    # A row that has seen no key yet: -inf - -inf is NaN.
    anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
    return tl.exp2(scores - anchor[:, None]), tl.exp2(top - anchor), new_top


@triton.jit
def _walk(
    acc,
    top,
    total,
    q,
    position,
    k_ptr,
    v_ptr,
    table_ptr,
    low,
    high,
    kv_token,
    in_scale,
    out_scale,
    MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT: tl.constexpr,
):
    """Attend to positions [low, high). Without MASKED all of them are visible to all rows, in whole steps.

    A step's blocks are looked up one step ahead and carried in registers. Looked up in the same step, the table would take
    the stages of the compiler's pipeline, and K and V be loaded with nothing beside them.
    """
    d = tl.arange(0, PADDED_DIM)
    ahead = low + tl.arange(0, BLOCK_N)
    following = tl.load(table_ptr + ahead // CHUNK, mask=ahead < high, other=0)
    for begin in range(low, high, BLOCK_N):
        n = begin + tl.arange(0, BLOCK_N)
        block = following
        after = n + BLOCK_N
        following = tl.load(table_ptr + after // CHUNK, mask=after < high, other=0)
        offset = (block.to(tl.int64) * CHUNK + n % CHUNK) * kv_token
        k_ptrs = k_ptr + offset[None, :] + d[:, None]  # transposed: [PADDED_DIM, BLOCK_N]
        v_ptrs = v_ptr + offset[:, None] + d[None, :]
        if MASKED or PADDED_DIM != HEAD_DIM:
            k = tl.load(k_ptrs, mask=(n < high)[None, :] & (d < HEAD_DIM)[:, None], other=0.0)
        else:
            k = tl.load(k_ptrs)
        scores = tl.dot(q, k.to(DOT), input_precision="ieee") * in_scale
        if SOFTCAP:  # tanh by the exponential: right at both ends, where exp2 is 0 or inf
            scores = (1.0 - 2.0 / (tl.exp2(scores) + 1.0)) * out_scale
        if MASKED:
            visible = (n[None, :] <= position[:, None]) & (n < high)[None, :]
            if WINDOW > 0:
                visible = visible & (n[None, :] > position[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        weights, decay, top = _weigh(scores, top)
        if MASKED or PADDED_DIM != HEAD_DIM:
            v = tl.load(v_ptrs, mask=(n < high)[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        else:
            v = tl.load(v_ptrs)
        total = total * decay + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(DOT), v.to(DOT), acc=acc * decay[:, None], input_precision="ieee")
    return acc, top, total


@triton.jit
def _tile(
    item_ptr,
    kv_head,
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    partial_ptr,
    weight_ptr,
    tables_ptr,
    in_scale,
    out_scale,
    q_token,
    q_head,
    kv_token,
    kv_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT: tl.constexpr,
):
    """One work item. Its result goes to `out`, or, of a split, to `partial` with the base-2 log of its weight."""
    first = tl.load(item_ptr + 1)
    count = tl.load(item_ptr + 2)
    start = tl.load(item_ptr + 3)
    table_ptr = tables_ptr + tl.load(item_ptr + 4)
    split = tl.load(item_ptr + 5)
    splits = tl.load(item_ptr + 6)
    partial = tl.load(item_ptr + 7)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, PADDED_DIM)
    query = m // GROUP
    head = kv_head * GROUP + m % GROUP
    position = start + query
    live = (query < count)[:, None] & (d < HEAD_DIM)[None, :]
    q_offset = (first + query).to(tl.int64) * q_token + head * q_head
    q = tl.load(q_ptr + q_offset[:, None] + d[None, :], mask=live, other=0.0).to(DOT)

    stop = start + count
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(0, start - WINDOW + 1)
    share = tl.cdiv(tl.cdiv(stop - lowest, BLOCK_N), splits) * BLOCK_N
    low = lowest + split * share
    high = tl.minimum(low + share, stop)

    k_ptr += kv_head.to(tl.int64) * kv_stride
    v_ptr += kv_head.to(tl.int64) * kv_stride
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, PADDED_DIM], dtype=tl.float32)
    if WINDOW == 0:  # the steps that lie wholly before the first query
        middle = low + tl.maximum(tl.minimum(high, start + 1) - low, 0) // BLOCK_N * BLOCK_N
        acc, top, total = _walk(
            acc, top, total, q, position, k_ptr, v_ptr, table_ptr, low, middle, kv_token, in_scale, out_scale,
            False, SOFTCAP, WINDOW, CHUNK, HEAD_DIM, PADDED_DIM, BLOCK_N, DOT,
        )  # fmt: skip
        low = middle
    acc, top, total = _walk(
        acc, top, total, q, position, k_ptr, v_ptr, table_ptr, low, high, kv_token, in_scale, out_scale,
        True, SOFTCAP, WINDOW, CHUNK, HEAD_DIM, PADDED_DIM, BLOCK_N, DOT,
    )  # fmt: skip

    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if splits == 1:
        row = (first + query).to(tl.int64) * HEADS + head
        tl.store(out_ptr + row[:, None] * HEAD_DIM + d[None, :], result.to(out_ptr.dtype.element_ty), mask=live)
    else:
        row = (partial + split * count + query).to(tl.int64) * HEADS + head
        tl.store(partial_ptr + row[:, None] * HEAD_DIM + d[None, :], result, mask=live)
        tl.store(weight_ptr + row, top + tl.log2(total), mask=query < count)  # -inf where there was no key


@triton.jit
def attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    partial_ptr,
    weight_ptr,
    items_ptr,
    tables_ptr,
    in_scale,
    out_scale,
    q_token,
    q_head,
    kv_token,
    kv_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SMALL_M: tl.constexpr,
    LARGE_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT: tl.constexpr,
    HAS_LARGE: tl.constexpr,
):
    """Grid (KV heads, items): the heads of an item run together, since their keys are neighbours in memory.

    q [tokens, heads, head_dim] by strides, out the same, contiguous; k and v at token 0 of the layer's pool, by strides
    kv_token and kv_stride (of a head). partial [rows, heads, head_dim] and weight [rows, heads] are float32. Scores in base
    2 are q.k * in_scale, and with SOFTCAP tanh of half of that * ln 2, times out_scale. WINDOW: 0 for none.
    DOT: what the products take, which is the pool's type but in Triton's interpreter, where a bfloat16 is its bits.
    """
    kv_head = tl.program_id(0)
    item_ptr = items_ptr + tl.program_id(1) * 8
    kind = tl.load(item_ptr)
    if kind == 1:
        _tile(
            item_ptr, kv_head, q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, weight_ptr, tables_ptr,
            in_scale, out_scale, q_token, q_head, kv_token, kv_stride,
            HEADS, GROUP, SOFTCAP, WINDOW, CHUNK, HEAD_DIM, PADDED_DIM, SMALL_M, BLOCK_N, DOT,
        )  # fmt: skip
    if HAS_LARGE:
        if kind == 2:
            _tile(
                item_ptr, kv_head, q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, weight_ptr, tables_ptr,
                in_scale, out_scale, q_token, q_head, kv_token, kv_stride,
                HEADS, GROUP, SOFTCAP, WINDOW, CHUNK, HEAD_DIM, PADDED_DIM, LARGE_M, BLOCK_N, DOT,
            )  # fmt: skip


@triton.jit
def join_kernel(
    out_ptr,
    partial_ptr,
    weight_ptr,
    joins_ptr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Grid (heads, joins): the splits of one query and head, weighted, into `out`."""
    head = tl.program_id(0)
    join_ptr = joins_ptr + tl.program_id(1) * 4
    query = tl.load(join_ptr)
    first = tl.load(join_ptr + 1)
    step = tl.load(join_ptr + 2)
    splits = tl.load(join_ptr + 3)
    if splits > 0:
        d = tl.arange(0, PADDED_DIM)
        top = tl.full([1], float("-inf"), dtype=tl.float32)
        total = tl.zeros([1], dtype=tl.float32)
        acc = tl.zeros([PADDED_DIM], dtype=tl.float32)
        for begin in range(0, splits, BLOCK_S):
            s = begin + tl.arange(0, BLOCK_S)
            row = (first + s * step).to(tl.int64) * HEADS + head
            weight = tl.load(weight_ptr + row, mask=s < splits, other=float("-inf"))
            value = tl.load(
                partial_ptr + row[:, None] * HEAD_DIM + d[None, :],
                mask=(s < splits)[:, None] & (d < HEAD_DIM)[None, :],
                other=0.0,
            )
            new_top = tl.maximum(top, tl.max(weight, axis=0))
            anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
            share = tl.exp2(weight - anchor)
            decay = tl.exp2(top - anchor)
            total = total * decay + tl.sum(share, axis=0)
            acc = acc * decay + tl.sum(value * share[:, None], axis=0)
            top = new_top
        result = acc / tl.where(total == 0.0, 1.0, total)
        out = out_ptr + (query.to(tl.int64) * HEADS + head) * HEAD_DIM + d
        tl.store(out, result.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)


@triton.jit
def write_kernel(
    k_ptr,
    v_ptr,
    pool_ptr,
    places_ptr,
    k_token,
    k_head,
    v_token,
    v_head,
    pool_token,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Grid (tokens,): the token's K and V, side by side, to its place in the layer's pool [tokens, 2, kv_heads, head_dim]."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PADDED)
    live = i < KV_HEADS * HEAD_DIM
    head = i // HEAD_DIM
    d = i % HEAD_DIM
    key = tl.load(k_ptr + token * k_token + head * k_head + d, mask=live)
    value = tl.load(v_ptr + token * v_token + head * v_head + d, mask=live)
    place = pool_ptr + tl.load(places_ptr + token) * pool_token
    tl.store(place + i, key, mask=live)
    tl.store(place + KV_HEADS * HEAD_DIM + i, value, mask=live)
