"""Attention on a CPU in C, straight over the blocks: decode rows and prefills."""

import ctypes
from pathlib import Path

import torch

from pensieve.compiler import Library, load_library
from pensieve.device.batch import Batch, Integers
from pensieve.device.kernels.base import Scores

_SOURCE = Path(__file__).with_name("native.c")
_ADDRESS = ctypes.c_void_p
_SIZES, _SCORES = [ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_int64], [ctypes.c_float] * 2 + [ctypes.c_int]


class NativePlan:
    """Spans of one query come first in a batch: they are rows of one call a layer, and the others of a second."""

    def __init__(self, library: Library, batch: Batch, chunk_tokens: int) -> None:
        self._functions, self._chunk_tokens = library.functions, chunk_tokens
        spans, self._rows = batch.spans, batch.spans.singles
        self._singles, self._several = spans.cut(0, self._rows), spans.cut(self._rows, len(spans))
        self._tables = self._singles.tables, self._several.tables
        self._lows: dict[int | None, Integers] = {}  # of the single rows, by window, since layers alternate
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
            if window not in self._lows:
                self._lows[window] = rows.lows(window)
            self._functions.attend_decode(
                some.data_ptr(), pool.data_ptr(), result.data_ptr(), self._lows[window].ctypes.data, rows.stop.ctypes.data,
                self._tables[0].ctypes.data, rows.blocks.ctypes.data, self._rows, *model, *how,
            )  # fmt: skip
        if spans := len(self._several):
            several = self._several
            self._functions.attend_prefill(
                queries.data_ptr(), queries.stride(0), pool.data_ptr(), result.data_ptr(), several.first.ctypes.data,
                several.start.ctypes.data, several.stop.ctypes.data, self._tables[1].ctypes.data,
                several.blocks.ctypes.data, spans, *model, window or 0, *how,
            )  # fmt: skip
        return result.to(asked)


def _by_token(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[tokens, kv_heads, head_dim] of this type, a token's numbers side by side."""
    x = x.to(dtype)
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


class NativeBackend:
    """For a CPU; a pool in 16 bits is read as it is, and all sums are float32. Raises EngineMissing where no compiler is,
    or it cannot compile this."""

    name = "native"

    def __init__(self, head_dim: int, dtype: torch.dtype = torch.float32) -> None:
        kind = str(dtype).removeprefix("torch.").upper()
        self._library = load_library(_SOURCE, (f"HEAD_DIM={head_dim}", kind))
        functions = self._library.functions
        functions.attend_decode.argtypes = [*[_ADDRESS] * 7, *_SIZES, *_SCORES]
        functions.attend_prefill.argtypes = [
            _ADDRESS, ctypes.c_int64, *[_ADDRESS] * 7, *_SIZES, ctypes.c_int64, *_SCORES,
        ]  # fmt: skip
        functions.write_tokens.argtypes = [_ADDRESS, ctypes.c_int64, *[_ADDRESS] * 3, *[ctypes.c_int64] * 4]
        functions.attend_decode.restype = functions.attend_prefill.restype = None
        functions.write_tokens.restype = ctypes.c_int64

    @property
    def version(self) -> str:
        return self._library.compiler

    def plan(self, batch: Batch, pool: torch.Tensor, chunk_tokens: int) -> NativePlan:
        return NativePlan(self._library, batch, chunk_tokens)
