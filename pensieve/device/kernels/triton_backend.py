"""The Triton backend: work lists to the device, tile sizes by a fixed table, three launches a layer."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from pensieve.device.batch import Batch, Spans
from pensieve.device.kernels.base import Scores
from pensieve.device.kernels.paged import attend_kernel, join_kernel, write_kernel
from pensieve.device.kernels.work_list import ITEM, JOIN, LARGE, Cutting, WorkList, padded, work_list

_LOG2_E = math.log2(math.e)
_LEAST_ROWS = 16  # of a tile: what tl.dot takes
RESERVED_SHARED = 1024  # of each program on a multiprocessor, for the system
_MOST_PROGRAMS = 3  # of small tiles: what their registers leave room for
_JOIN_SPLITS = 16
_WGMMA_ROWS = 64
_LEAST_SHARED = 99 * 1024  # what every GPU since Ampere gives one program
_INTERPRETED_PROGRAMS = 16  # a small machine, so that tests split
# Majors whose products read shared memory: wgmma, and tcgen05 after it. Consumer Blackwell (12) has neither, and the shared
# memory of 8.9: it is given the tiles of that.
_SHARED_PRODUCTS = (9, 10)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes of one launch: rows of a large tile, keys a step, warps, and stages of the copy pipeline."""

    large_rows: int
    block_keys: int
    warps: int
    stages: int

    @property
    def options(self) -> Mapping[str, Any]:
        """What the compiler is told."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}

    def shared_bytes(self, padded_dim: int, itemsize: int, rows: int, capability: int = 8) -> int:
        """Of one program, what the compiler takes at most: the queries, the buffers of K and V, and the weights of a step.

        The stage that computes needs no buffer beside those that are being filled, but for wgmma, which reads shared memory
        while the next step begins, for tiles of 64 rows (_SHARED_PRODUCTS).
        """
        buffers = self.stages if capability in _SHARED_PRODUCTS and rows >= _WGMMA_ROWS else max(1, self.stages - 1)
        kv = 2 * self.block_keys * padded_dim * itemsize * buffers
        return rows * padded_dim * itemsize + kv + rows * self.block_keys * itemsize

    def programs(self, padded_dim: int, itemsize: int, rows: int, capability: int, shared_bytes: int) -> int:
        """How many a multiprocessor holds. Large tiles fill it by their registers, small ones by their shared memory: so it
        came out in every kernel that was compiled (docs/results/kernels.md)."""
        if self.large_rows:
            return 1
        taken = self.shared_bytes(padded_dim, itemsize, rows, capability) + RESERVED_SHARED
        return max(1, min(_MOST_PROGRAMS, (shared_bytes + RESERVED_SHARED) // taken))


# By bytes an element and by whether the launch has large tiles: the first that fits is taken. Chosen so that in 16 bits no
# register is spilled with heads of 128 (docs/results/kernels.md has what each became): 128 x 64 with 8 warps spills on sm_80,
# where 128 x 32 does not. float32 products are unrolled, and take a minute to compile when they are larger.
_TILES = {
    (2, True): (
        Tiles(128, 32, 8, 3),
        Tiles(64, 64, 8, 3),
        Tiles(64, 64, 8, 2),
        Tiles(64, 32, 8, 2),
        Tiles(64, 32, 8, 1),
    ),
    (2, False): (Tiles(0, 64, 4, 3), Tiles(0, 32, 4, 3), Tiles(0, 32, 4, 2), Tiles(0, 16, 4, 1)),
    (4, True): (Tiles(32, 32, 8, 2), Tiles(32, 16, 8, 1)),
    (4, False): (Tiles(0, 32, 4, 2), Tiles(0, 16, 4, 1)),
}
_WGMMA_TILES = (Tiles(128, 64, 8, 3),)  # large ones in 16 bits, tried first where products read shared memory
_MOST_ACCUMULATORS = {2: 2048, 4: 512}  # rows times head_dim of a tile, a warp: they live in registers


def tiles_for(
    padded_dim: int, itemsize: int, small_rows: int, large: bool, shared_bytes: int, capability: int = 8
) -> Tiles:
    """shared_bytes: what one program may have on this device. A launch with large tiles may hold small ones too.

    Of a launch of small tiles in 16 bits two programs shall share a multiprocessor: each has few warps, and computes while
    the other waits for its keys. What a multiprocessor has is RESERVED_SHARED more than what one program may have.
    """
    table = _TILES[itemsize, large]
    if large and itemsize == 2 and capability in _SHARED_PRODUCTS:
        table = (*_WGMMA_TILES, *table)
    if not large and itemsize == 2:
        shared_bytes = (shared_bytes + RESERVED_SHARED) // 2 - RESERVED_SHARED
    for tiles in table:
        rows = max(small_rows, tiles.large_rows)
        fits = tiles.shared_bytes(padded_dim, itemsize, rows, capability) <= shared_bytes
        if fits and (rows == small_rows or rows * padded_dim <= tiles.warps * _MOST_ACCUMULATORS[itemsize]):
            return tiles
    return table[-1]


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a model and a device fix: sizes of heads, and of the device."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def padded_dim(self) -> int:
        return max(_LEAST_ROWS, triton.next_power_of_2(self.head_dim))

    @property
    def small_rows(self) -> int:
        return max(_LEAST_ROWS, triton.next_power_of_2(self.group))

    @property
    def _card(self) -> tuple[int, int]:
        """The shared memory that one program may have, and the capability's major."""
        if self.device.type != "cuda":
            return 2**20, 8
        properties = torch.cuda.get_device_properties(self.device)
        return getattr(properties, "shared_memory_per_block_optin", _LEAST_SHARED), properties.major

    def tiles(self, large: bool) -> Tiles:
        """Choose the sizes of a launch."""
        return tiles_for(self.padded_dim, self.dtype.itemsize, self.small_rows, large, *self._card)

    def cutting(self, tiles: Tiles) -> Cutting:
        """Choose how work is cut for this device: into as many programs as it holds at once."""
        programs, rows = _INTERPRETED_PROGRAMS, max(self.small_rows, tiles.large_rows)
        if self.device.type == "cuda":
            shared, capability = self._card
            programs = torch.cuda.get_device_properties(self.device).multi_processor_count
            programs *= tiles.programs(self.padded_dim, self.dtype.itemsize, rows, capability, shared)
        return Cutting(
            small_queries=self.small_rows // self.group,
            large_queries=rows // self.group,
            block_keys=tiles.block_keys,
            wanted_items=-(-programs // self.kv_heads),
        )


@dataclass(frozen=True, slots=True)
class Launch:
    """A work list on the device. Only its first rows may be in use: the rest is zero, and its programs exit.

    large: the kernel takes large and small tiles; otherwise small ones only. There is no third kernel for large tiles
    alone, since the warm-up would never run it and a request would wait for its compilation.
    """

    tiles: Tiles
    items: torch.Tensor
    joins: torch.Tensor
    partial: torch.Tensor
    weight: torch.Tensor
    large: bool


class _TritonPlan(ABC):
    """What a one-off and a standing plan share; they differ only in where the descriptors of the work are kept."""

    _tables: torch.Tensor

    @abstractmethod
    def _launch(self, geometry: Geometry, window: int | None) -> Launch:
        """Return a window's launch, made at its first layer and kept for the others."""

    def __init__(self, pool: torch.Tensor, chunk_tokens: int, backend: TritonBackend) -> None:
        assert chunk_tokens & (chunk_tokens - 1) == 0, "blocks hold a power of two of tokens"
        self._chunk_tokens = chunk_tokens
        self._backend = backend
        self._launches: dict[int | None, Launch] = {}  # by window: layers alternate

    def write(self, pool: torch.Tensor, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        tokens, kv_heads, head_dim = keys.shape
        keys, values = _unit_stride(keys), _unit_stride(values)
        with torch.cuda.device_of(pool):
            write_kernel[(tokens,)](
                keys, values, pool, places,
                keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), pool.stride(0),
                KV_HEADS=kv_heads, HEAD_DIM=head_dim, PADDED=triton.next_power_of_2(kv_heads * head_dim),
            )  # fmt: skip

    def attend(
        self, pool: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        scaling, window, softcap = scores
        output = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        _, heads, head_dim = queries.shape
        geometry = Geometry(heads, pool.shape[2], head_dim, pool.dtype, pool.device)
        if window not in self._launches:
            self._launches[window] = self._launch(geometry, window)
        launch = self._launches[window]
        queries = _unit_stride(queries)
        k, v = pool[:, 0], pool[:, 1]
        scale = head_dim**-0.5 if scaling is None else scaling
        # tanh(x) is made of 2 ** (x * 2 log2 e), so that a cap costs one exponential.
        scales = (scale * _LOG2_E, 1.0) if softcap is None else (scale / softcap * 2 * _LOG2_E, softcap * _LOG2_E)
        tiles = launch.tiles
        with torch.cuda.device_of(pool):
            attend_kernel[(geometry.kv_heads, len(launch.items))](
                queries, k, v, output, launch.partial, launch.weight, launch.items, self._tables,
                *scales, queries.stride(0), queries.stride(1), k.stride(0), k.stride(1),
                HEADS=heads, GROUP=geometry.group, SOFTCAP=softcap is not None, WINDOW=window or 0,
                CHUNK=self._chunk_tokens, HEAD_DIM=head_dim, PADDED_DIM=geometry.padded_dim,
                SMALL_M=geometry.small_rows, LARGE_M=max(geometry.small_rows, tiles.large_rows),
                BLOCK_N=tiles.block_keys, DOT=_dot_type(pool.dtype),
                HAS_LARGE=launch.large, **tiles.options,
            )  # fmt: skip
            if len(launch.joins):
                join_kernel[(heads, len(launch.joins))](
                    output, launch.partial, launch.weight, launch.joins,
                    HEADS=heads, HEAD_DIM=head_dim, PADDED_DIM=geometry.padded_dim, BLOCK_S=_JOIN_SPLITS,
                    num_warps=4, enable_fp_fusion=True,
                )  # fmt: skip
        return output


class OncePlan(_TritonPlan):
    """For one batch: launches are as large as its work. Where the join kernel has not been launched yet, a plan without joins
    launches an empty one, so that no later request waits for the compiler when its context is split."""

    def __init__(self, batch: Batch, pool: torch.Tensor, chunk_tokens: int, backend: TritonBackend) -> None:
        super().__init__(pool, chunk_tokens, backend)
        self._spans = batch.spans
        self._tables = sent(batch.spans.blocks.astype(np.int32), pool.device)

    def _launch(self, geometry: Geometry, window: int | None) -> Launch:
        large = int(self._spans.queries.max()) * geometry.group > geometry.small_rows
        tiles = geometry.tiles(large)
        work = work_list(self._spans, geometry.cutting(tiles), window)
        nothing = np.zeros((0 if geometry in self._backend.joined else 1, JOIN), dtype=np.int32)
        self._backend.joined.add(geometry)
        items, joins = (
            sent(part, geometry.device) for part in (work.items, work.joins if len(work.joins) else nothing)
        )
        return Launch(tiles, items, joins, *_partials(work.partial_rows, geometry), LARGE in work.kinds)


class StandingPlan(_TritonPlan):
    """For single positions, up to a capacity: tensors and launches stay the same, as a captured graph needs."""

    def __init__(
        self, pool: torch.Tensor, chunk_tokens: int, rows: int, max_blocks: int, backend: TritonBackend
    ) -> None:
        super().__init__(pool, chunk_tokens, backend)
        self._rows = rows
        self._tables = torch.zeros(rows * max_blocks, dtype=torch.int32, device=pool.device)
        self._cuttings: dict[int | None, Cutting] = {}
        self._spans: Spans | None = None

    def update(self, batch: Batch) -> None:
        assert batch.all_single and len(batch.spans) <= self._rows
        self._spans, blocks = padded(batch.spans, self._rows), batch.spans.blocks.astype(np.int32)
        assert len(blocks) <= len(self._tables), "a row has more blocks than there is room for"
        send(blocks, self._tables[: len(blocks)])
        for window, launch in self._launches.items():
            self._fill(launch, work_list(self._spans, self._cuttings[window], window))

    def _launch(self, geometry: Geometry, window: int | None) -> Launch:
        assert self._spans is not None, "update() comes first"
        capturing = geometry.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        assert not capturing, (
            "attend once outside a capture first: a list made inside would be made again at every replay"
        )
        tiles = geometry.tiles(large=False)
        cutting = self._cuttings[window] = geometry.cutting(tiles)
        most = self._rows + cutting.wanted_items  # items, and so rows of partial results
        items, joins = (
            torch.zeros(size, dtype=torch.int32, device=geometry.device) for size in ((most, ITEM), (self._rows, JOIN))
        )
        launch = Launch(tiles, items, joins, *_partials(most, geometry), large=False)
        self._fill(launch, work_list(self._spans, cutting, window))
        return launch

    @staticmethod
    def _fill(launch: Launch, work: WorkList) -> None:
        for target, part in ((launch.items, work.items), (launch.joins, work.joins)):
            assert len(part) <= len(target)
            whole = np.zeros(tuple(target.shape), dtype=np.int32)
            whole[: len(part)] = part
            send(whole, target)


def send(values: NDArray[np.int32], target: torch.Tensor) -> None:
    """Copy values into `target` without waiting for the device: from pinned memory, which torch keeps until the copy is
    done."""
    source = torch.from_numpy(values)
    target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)


def sent(values: NDArray[np.int32], device: torch.device) -> torch.Tensor:
    """Make a new tensor on the device, filled as `send` does it."""
    target = torch.empty(values.shape, dtype=torch.int32, device=device)
    send(values, target)
    return target


def _partials(rows: int, geometry: Geometry) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (max(1, rows), geometry.heads, geometry.head_dim)  # never empty: a launch takes their addresses
    return (
        torch.empty(shape, dtype=torch.float32, device=geometry.device),
        torch.empty(shape[:2], dtype=torch.float32, device=geometry.device),
    )


def _dot_type(dtype: torch.dtype) -> tl.dtype:
    if not isinstance(attend_kernel, triton.runtime.JITFunction):  # interpreted
        return tl.float32
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]


def _unit_stride(x: torch.Tensor) -> torch.Tensor:
    """The kernels step through a head one element at a time."""
    return x if x.stride(-1) == 1 else x.contiguous()


class TritonBackend:
    """Needs triton, and a GPU or Triton's interpreter. joined: where the join kernel has been launched, and so compiled."""

    name = "triton"

    def __init__(self) -> None:
        self.joined: set[Geometry] = set()

    @cached_property
    def version(self) -> str:
        return str(triton.__version__)

    def plan(self, batch: Batch, pool: torch.Tensor, chunk_tokens: int) -> OncePlan:
        return OncePlan(batch, pool, chunk_tokens, self)

    def standing(self, pool: torch.Tensor, chunk_tokens: int, rows: int, max_blocks: int) -> StandingPlan:
        return StandingPlan(pool, chunk_tokens, rows, max_blocks, self)
