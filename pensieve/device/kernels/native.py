"""Attention on a CPU in C, straight over the blocks: decode rows and prefills."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from pensieve.compiler import Library, load_library
from pensieve.device.batch import Batch, Spans
from pensieve.device.kernels.base import Scores

_SOURCE = Path(__file__).with_name("native.c")
_ADDRESS = ctypes.c_void_p
_SIZES, _SCORES = [ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_int64], [ctypes.c_float] * 2 + [ctypes.c_int]


class NativePlan:
    """Spans of one query come first in a batch: they are rows of one call a layer, and the others of a second."""

    def __init__(self, library: Library, batch: Batch, chunk_tokens: int) -> None:
        self._functions, self._chunk_tokens = library.functions, chunk_tokens
        spans, self._rows = batch.spans, batch.spans.singles
        self._singles, self._several = _Spans(spans.cut(0, self._rows)), _Spans(spans.cut(self._rows, len(spans)))
        self._threads = torch.get_num_threads() if library.threads else 1

    def write(self, pool: torch.Tensor, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        count, kv_heads, head_dim = keys.shape
        keys, values = _by_token(keys, pool.dtype), _by_token(values, pool.dtype)
        assert pool.is_contiguous() and places.is_contiguous() and places.dtype == torch.int64, places.dtype
        assert len(places) == count and keys.shape == values.shape, (places.shape, keys.shape, values.shape)
        assert pool.shape[1:] == (2, kv_heads, head_dim), (pool.shape, keys.shape)
        written = self._functions.write_tokens(
            pool.data_ptr(), len(pool), places.data_ptr(), keys.data_ptr(), values.data_ptr(), count, keys.stride(0),
            values.stride(0), kv_heads * head_dim,
        )  # fmt: skip
        if written != count:
            raise IndexError(f"place {int(places[written])} is not one of the pool's {len(pool)}")

    def attend(
        self, pool: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        scaling, window, softcap = scores
        _, heads, head_dim = queries.shape
        kv_heads = pool.shape[2]
        asked, queries = queries.dtype, _by_token(queries, torch.float32)
        assert pool.is_contiguous()
        result = torch.empty(queries.shape)
        model = kv_heads, heads // kv_heads, self._chunk_tokens
        how = head_dim**-0.5 if scaling is None else scaling, softcap or 0.0, self._threads
        if self._rows:
            some, rows = queries[: self._rows].contiguous(), self._singles
            self._functions.attend_decode(
                some.data_ptr(), pool.data_ptr(), result.data_ptr(), rows.lows(window).ctypes.data, rows.stops.ctypes.data,
                rows.tables.ctypes.data, rows.blocks.ctypes.data, self._rows, *model, *how,
            )  # fmt: skip
        if spans := len(self._several.starts):
            several = self._several
            self._functions.attend_prefill(
                queries.data_ptr(), queries.stride(0), pool.data_ptr(), result.data_ptr(), several.firsts.ctypes.data,
                several.starts.ctypes.data, several.stops.ctypes.data, several.tables.ctypes.data,
                several.blocks.ctypes.data, spans, *model, window or 0, *how,
            )  # fmt: skip
        return result.to(asked)


def _by_token(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[tokens, kv_heads, head_dim] of this type, a token's numbers side by side."""
    x = x.to(dtype)
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


class _Spans:
    """Spans as the arrays that a call takes. blocks: those of all, tables: where each span's begin."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self.firsts, self.starts, self.stops, self.tables, self.blocks = (
            np.ascontiguousarray(x) for x in (spans.first, spans.start, spans.stop, spans.tables, spans.blocks)
        )
        self._lows: dict[int | None, NDArray[np.int64]] = {}

    def lows(self, window: int | None) -> NDArray[np.int64]:
        """The first position that each row attends to; one array a window, since layers alternate."""
        if window not in self._lows:
            self._lows[window] = np.ascontiguousarray(self._spans.lows(window))
        return self._lows[window]


class NativeBackend:
    """For a CPU; a pool in 16 bits is read as it is, and all sums are float32. Raises EngineMissing where no compiler is,
    or it cannot compile this."""

    name = "native"
    captures = False

    def __init__(self, head_dim: int, dtype: torch.dtype = torch.float32) -> None:
        kind = str(dtype).removeprefix("torch.").upper()
        self._library = load_library(_SOURCE, (f"HEAD_DIM={head_dim}", kind))
        function = self._library.functions.attend_decode
        function.restype = None
        function.argtypes = [*[_ADDRESS] * 7, *_SIZES, *_SCORES]
        prefill = self._library.functions.attend_prefill
        prefill.restype = None
        prefill.argtypes = [_ADDRESS, ctypes.c_int64, *[_ADDRESS] * 7, *_SIZES, ctypes.c_int64, *_SCORES]
        writing = self._library.functions.write_tokens
        writing.restype = ctypes.c_int64
        writing.argtypes = [_ADDRESS, ctypes.c_int64, *[_ADDRESS] * 3, *[ctypes.c_int64] * 4]

    @property
    def version(self) -> str:
        """The compiler's name and number: `cc (Debian 12.2.0-14) 12.2.0` is cc 12.2.0."""
        said = self._library.compiler
        numbers = re.findall(r"(?<!\S)\d+(?:\.\d+)+", said)
        name = "clang" if "clang" in said else said.split()[0]
        return f"{name} {numbers[-1]}" if numbers else said

    def plan(self, batch: Batch, pool: torch.Tensor, chunk_tokens: int) -> NativePlan:
        return NativePlan(self._library, batch, chunk_tokens)
