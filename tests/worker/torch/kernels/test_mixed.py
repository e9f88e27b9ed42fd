"""A library for the prompts and the real kernel, interpreted, for the decode rows of one batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pensieve.worker.torch.batch import Batch
from pensieve.worker.torch.kernels.flashinfer import FlashInferPlan
from pensieve.worker.torch.kernels.mixed import MixedBackend
from pensieve.worker.torch.kernels.triton_backend import TritonBackend
from pensieve.worker.torch.kernels.varlen import VarlenPlan

from .cases import MIXED, make_case
from .test_library_backends import Library, varlen_attn


class _Prompts:
    """A library whose plans see nothing but prompts."""

    version, captures = "1.0", False

    def __init__(self, name: str) -> None:
        self.name = name

    def plan(self, batch: Batch, pool: torch.Tensor, chunk_tokens: int) -> Any:
        assert min(span.queries for span in batch.spans) > 1 and batch.spans[0].first == 0
        if self.name == "varlen":
            return VarlenPlan(varlen_attn, batch, pool, chunk_tokens)
        return FlashInferPlan(Library(), {}, {}, batch, pool, chunk_tokens)


@pytest.mark.parametrize("name", ["varlen", "flashinfer"])
@pytest.mark.parametrize(
    "rows", [MIXED, [[(0, 40)], [(70, 90)]], [[(99, 100)], [(5, 6)]]], ids=["both", "prompts", "decodes"]
)
def test_each_computes_its_rows(name: str, rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pensieve.worker.torch.kernels.flashinfer._WORKSPACE_BYTES", 16)
    backend = MixedBackend(_Prompts(name), TritonBackend())
    assert (backend.name, backend.captures, backend.version[:6]) == (f"{name}+triton", True, "1.0 + ")
    case = make_case(rows)
    for window in (None, 20):
        got = case.attend(backend.plan(case.batch, case.pool, case.chunk), 0.3, window, None)
        case.check(got, case.expected(0.3, window, None))
