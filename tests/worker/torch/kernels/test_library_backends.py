"""varlen and flashinfer over stand-ins that keep to the libraries' documentation: what they are handed must be enough."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from pensieve.device.kernels.reference import ReferencePlan
from pensieve.errors import EngineMissing, UnsupportedModel
from pensieve.plugins.device import varlen
from pensieve.plugins.device.flashinfer import FlashInferPlan
from pensieve.plugins.device.varlen import VarlenBackend, VarlenPlan

from .cases import MIXED, make_case


def _attend(queries, keys, values, scale, left, cap):
    """Causal, aligned at the end. queries [m, heads, dim], keys [n, kv_heads, dim]. left: keys before the query; -1: all."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,nhd->hqn", queries, keys) * (queries.shape[2] ** -0.5 if scale is None else scale)
    if cap:
        scores = cap * torch.tanh(scores / cap)
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
        pieces.append(_attend(query[cu_seq_q[index] : cu_seq_q[index + 1]], k, v, scale, window_size[0], None))
    return torch.cat(pieces)


class _Wrapper:
    """BatchPrefillWithPagedKVCacheWrapper in NHD: pages of a sequence by indptr and indices, the last partly used."""

    made = 0

    def __init__(self, float_workspace_buffer, kv_layout):
        assert kv_layout == "NHD" and float_workspace_buffer.dtype == torch.uint8
        type(self).made += 1

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        *,
        causal,
        sm_scale,
        window_left,
        logits_soft_cap,
        q_data_type,
        kv_data_type,
    ):
        assert causal and {x.dtype for x in (qo_indptr, paged_kv_indptr, paged_kv_indices)} == {torch.int32}
        self.sizes = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self.bounds, self.pages, self.last = (
            qo_indptr.tolist(),
            paged_kv_indptr.tolist(),
            paged_kv_last_page_len.tolist(),
        )
        self.indices, self.options = paged_kv_indices.long(), (sm_scale, window_left, logits_soft_cap)

    def run(self, q, paged_kv_cache):
        assert q.is_contiguous()
        assert self.sizes == (q.shape[1], paged_kv_cache[0].shape[2], q.shape[2], paged_kv_cache[0].shape[1])
        pieces = []
        for index, last in enumerate(self.last):
            own = self.indices[self.pages[index] : self.pages[index + 1]]
            used = (len(own) - 1) * self.sizes[3] + last
            k, v = (x[own].flatten(0, 1)[:used] for x in paged_kv_cache)
            pieces.append(_attend(q[self.bounds[index] : self.bounds[index + 1]], k, v, *self.options))
        return torch.cat(pieces)


class Library:
    BatchPrefillWithPagedKVCacheWrapper = _Wrapper


def _plan(name, case, wrappers):
    if name == "reference":
        return ReferencePlan(case.batch, case.pool, case.chunk)
    if name == "varlen":
        return VarlenPlan(varlen_attn, case.batch, case.pool, case.chunk)
    return FlashInferPlan(Library(), wrappers, {}, case.batch, case.pool, case.chunk)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("name", ["reference", "varlen", "flashinfer"])
def test_mixed_rows_equal_the_definition(name, window, monkeypatch):
    monkeypatch.setattr("pensieve.plugins.device.flashinfer._WORKSPACE_BYTES", 16)
    wrappers = {}
    for seed in range(2):  # a second iteration plans anew in what the first one made
        case = make_case(MIXED, seed=seed)
        got = case.attend(_plan(name, case, wrappers), 0.3, window, None)
        case.check(got, case.expected(0.3, window, None))
    assert len(wrappers) == (name == "flashinfer")


def test_softcap(monkeypatch):
    monkeypatch.setattr("pensieve.plugins.device.flashinfer._WORKSPACE_BYTES", 16)
    case = make_case(MIXED)
    for name in ("reference", "flashinfer"):
        case.check(case.attend(_plan(name, case, {}), 0.3, None, 2.0), case.expected(0.3, None, 2.0))
    with pytest.raises(UnsupportedModel, match="caps its attention scores"):
        case.attend(_plan("varlen", case, {}), 0.3, None, 2.0)


def test_avarlen_attn_that_lacks_what_is_needed_is_named(monkeypatch):
    def older(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale):
        raise AssertionError("not called")

    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=older))
    with pytest.raises(EngineMissing, match="takes no block_table, seqused_k, enable_gqa, window_size, which"):
        VarlenBackend(torch.device("cuda"), torch.bfloat16, 64, 32)


def test_avarlen_attn_that_refuses_blocks_of_this_size_is_quoted(monkeypatch):
    def refuses(*args, **options):
        raise RuntimeError("Paged KV cache block size must be divisible by 256\nmore")

    monkeypatch.setattr(varlen, "_function", lambda: refuses)
    on_cpu = {name: getattr(torch, name) for name in ("zeros", "tensor")}
    for name, make in on_cpu.items():
        monkeypatch.setattr(torch, name, lambda *args, make=make, device, **options: make(*args, **options))
    with pytest.raises(EngineMissing, match=r"refuses blocks of 32 tokens .*divisible by 256\); use") as raised:
        VarlenBackend(torch.device("cuda"), torch.bfloat16, 64, 32)
    assert "more" not in str(raised.value)
