"""What is done in C on a CPU: products of few rows, norms and rotations. Against their definitions, and row by row."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from pensieve.compiler import find_compiler
from pensieve.core.plan import Row, Sample
from pensieve.device.attention import Iteration
from pensieve.device.batch import BlockTables, build_batch
from pensieve.device.fused import build_fused, few_rows
from pensieve.device.fused.few_rows import FEW_ROWS, FewRows, RowKernels
from pensieve.device.kernels.native import NativeBackend
from pensieve.device.kv_tensors import KvTensors
from pensieve.errors import EngineMissing

from .driver import PROCESSORS

try:
    find_compiler()
except EngineMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)

CHUNK = 8


def _noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("processor", ["this", *sorted(PROCESSORS)])
def test_a_product_is_that_of_its_weights_on_any_processor_and_other_rows_change_nothing(processor, dtype, compile_for):
    """Compilers round a product and its sum once or twice as they think fit for each number of rows, if they may."""
    if processor != "this":
        compile_for(processor)
    for inside, outside in ((576, 97), (40, 64), (77, 3), (16, 1), (5, 130)):
        weights, bias = _noise(outside, inside, seed=101).to(dtype), _noise(outside, seed=103).to(dtype)
        x = _noise(9, inside).to(dtype)
        for added in (bias, None):
            product = FewRows(weights, added)
            exact = x.double() @ weights.double().t() + (0 if added is None else added.double())
            alone = torch.cat([product(row[None]) for row in x])
            rounding = 2**-8 * exact.abs() if dtype == torch.bfloat16 else 0  # once, of the result
            assert bool(((alone - exact).abs() <= 2e-6 * inside**0.5 + rounding).all())
            for rows in range(2, 10):
                assert torch.equal(product(x[:rows]), alone[:rows])
    turned = _noise(5, 3).to(dtype).t()
    assert torch.equal(product(turned), product(turned.contiguous()))


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2e-6), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize("size", [64, 100, 7])
def test_norm_rotation_and_gate_are_torchs(size, dtype, rounding):
    """Of the same numbers in float32, rounded once."""
    kernels = RowKernels(dtype)
    close = partial(torch.testing.assert_close, rtol=rounding, atol=1e-6)
    x, weight = (_noise(9, size) * torch.logspace(-3, 3, 9)[:, None]).to(dtype), _noise(size, seed=1)
    got = kernels.rms_norm(x, weight, 1e-5)
    close(got.float(), F.rms_norm(x.float(), (size,), weight, 1e-5))
    assert torch.equal(kernels.rms_norm(x.t().contiguous().t(), weight, 1e-5), got)
    even = 2 * (size // 2)
    heads, cos, sin = (_noise(9, n, even, seed=n).to(dtype) for n in (5, 1, 1))
    expected, before = heads.float(), heads.clone()
    expected[:, :3] = expected[:, :3] * cos + expected[:, :3].roll(even // 2, -1) * sin
    kernels.rotate(heads, 3, cos, sin)
    close(heads.float(), expected)
    assert torch.equal(heads[:, 3:], before[:, 3:]), "values are not rotated"
    both = torch.cat([x, x.flip(0)], dim=1)
    both[0, :4] = torch.tensor([-1e4, -95.0, 95.0, float("nan")])
    gate, up = both.float().chunk(2, dim=-1)
    close(kernels.gate(both).float(), F.silu(gate) * up, equal_nan=True)


def test_threads_change_nothing():
    product, kernels = FewRows(_noise(300, 64), None), RowKernels(torch.float32)
    x, wide, weight, turned = _noise(3, 64), _noise(40, 2048), _noise(2048), _noise(40, 1, 64, seed=5)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            heads = wide.view(40, 32, 64).clone()
            kernels.rotate(heads, 20, turned, turned)
            results.append((product(x), kernels.rms_norm(wide, weight, 1e-6), heads, kernels.gate(wide)))
    finally:
        torch.set_num_threads(before)
    for each in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results[0], each, strict=True))


def _decode(forward, model, pool, slots, sampled=None):
    """Logits of one token in each of these slots, whose contexts have different lengths in blocks of their own; of the first
    `sampled` of them, or of all."""
    tables, rows = BlockTables(), []
    for slot in slots:
        tables.overwrite(slot, 0, [3 * slot, 3 * slot + 1, 3 * slot + 2])
        rows.append(Row(slot, ((5 + slot, 6 + slot),), (7 * slot + 1,), Sample(6 + slot)))
    batch = build_batch(rows, tables, CHUNK, model.device)
    backend = NativeBackend(model.spec.head_dim)
    order = [slot for slot, _ in batch.sampled]
    kept = [index for index, slot in enumerate(order) if slot in slots[:sampled]]
    with torch.inference_mode():
        logits = forward(Iteration(batch, pool.gpu_tokens(), CHUNK, backend=backend), batch.logits_at[kept])
    return logits[[kept.index(order.index(slot)) for slot in slots[:sampled]]]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "qwen3"])
def test_a_decoded_row_is_the_same_alone_and_among_others(name, model_of):
    """Bit for bit, as long as the batch is small enough to be multiplied in C; and in all larger ones, which are packed,
    whether few or all of their rows are sampled."""
    model = model_of(name)
    forward = build_fused(copy.deepcopy(model.module), pack=True)
    few, most = FEW_ROWS, 12
    pool = KvTensors(model.spec, CHUNK, 3 * most, 0, model.device, model.dtype)
    pool.gpu.normal_(generator=torch.Generator().manual_seed(0))
    alone = torch.cat([_decode(forward, model, pool, [slot]) for slot in range(few)])
    for count in range(2, few + 1):
        assert torch.equal(_decode(forward, model, pool, list(range(count))), alone[:count])
    packed = _decode(forward, model, pool, list(range(most)))
    for count in (few + 1, 7, 8, 11):
        assert torch.equal(_decode(forward, model, pool, list(range(count))), packed[:count])
    assert torch.equal(_decode(forward, model, pool, list(range(few + 1)), 2), packed[:2])
    for sampled in (1, 3, few, few + 1):
        assert torch.equal(_decode(forward, model, pool, list(range(most)), sampled), packed[:sampled])
    torch.testing.assert_close(packed[:few], alone, rtol=0, atol=1e-4)


def test_without_a_compiler_weights_are_not_packed(model_of, monkeypatch):
    def missing(*given):
        raise EngineMissing("no compiler")

    monkeypatch.setattr(few_rows, "load_library", missing)
    assert not build_fused(copy.deepcopy(model_of("llama").module), memory_bytes=2**40).packed
