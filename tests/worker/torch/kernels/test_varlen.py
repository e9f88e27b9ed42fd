"""varlen over a stand-in that keeps to torch's documentation: what it is handed must be enough."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from pensieve.errors import EngineMissing, UnsupportedModel
from pensieve.plugins.device import varlen
from pensieve.plugins.device.varlen import VarlenBackend, VarlenPlan

from .cases import MIXED, make_case


def _attend(queries, keys, values, scale, left):
    """Causal, aligned at the end. queries [m, heads, dim], keys [n, kv_heads, dim]. left: keys before the query; -1: all."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,nhd->hqn", queries, keys) * (queries.shape[2] ** -0.5 if scale is None else scale)
    query = torch.arange(len(keys) - len(queries), len(keys))[:, None]
    key = torch.arange(len(keys))
    hidden = (key > query) | ((key < query - left) if left >= 0 else torch.zeros((), dtype=torch.bool))
    return torch.einsum("hqn,nhd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)


def varlen_attn(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k,
    block_table,
):
    assert cu_seq_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    assert enable_gqa == (query.shape[1] != key.shape[2]) and query.is_contiguous() and window_size[1] == 0
    assert max_q == int(cu_seq_q.diff().max()) and max_k == int(seqused_k.max()) and cu_seq_k is None
    assert int(block_table.min()) >= 0 and int(block_table.max()) < len(key)
    pieces = []
    for index, used in enumerate(seqused_k.tolist()):
        k, v = (x[block_table[index].long()].flatten(0, 1)[:used] for x in (key, value))
        pieces.append(_attend(query[cu_seq_q[index] : cu_seq_q[index + 1]], k, v, scale, window_size[0]))
    return torch.cat(pieces)


@pytest.mark.parametrize("window", [None, 20])
def test_mixed_rows_equal_the_definition(window):
    case = make_case(MIXED)
    plan = VarlenPlan(varlen_attn, case.batch, case.pool, case.chunk)
    case.check(case.attend(plan, 0.3, window, None), case.expected(0.3, window, None))
    with pytest.raises(UnsupportedModel, match="caps its attention scores"):
        case.attend(plan, 0.3, None, 2.0)


def test_varlen_attn_that_lacks_what_is_needed_is_named(monkeypatch):
    def older(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale):
        raise AssertionError("not called")

    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=older))
    with pytest.raises(EngineMissing, match="with block_table, seqused_k, enable_gqa, window_size; use"):
        VarlenBackend(torch.device("cuda"), torch.bfloat16, 64, 32)


def test_varlen_attn_that_refuses_blocks_of_this_size_is_quoted(monkeypatch):
    def refuses(*args, **options):
        raise RuntimeError("Paged KV cache block size must be divisible by 256\nmore")

    monkeypatch.setattr(varlen, "_function", lambda: refuses)
    on_cpu = {name: getattr(torch, name) for name in ("zeros", "tensor")}
    for name, make in on_cpu.items():
        monkeypatch.setattr(torch, name, lambda *args, make=make, device, **options: make(*args, **options))
    with pytest.raises(EngineMissing, match=r"refuses blocks of 32 tokens .*divisible by 256\); use") as raised:
        VarlenBackend(torch.device("cuda"), torch.bfloat16, 64, 32)
    assert "more" not in str(raised.value)
