"""Forwards that are faster than transformers' own modules, against them: joined, packed, and in C row by row; how one is
chosen, and refused."""

import copy
from functools import partial

import psutil
import pytest
import torch
import torch.nn.functional as F

from pensieve.compiler import find_compiler
from pensieve.core.plan import Row, Sample
from pensieve.device.asked import ModelAsked
from pensieve.device.attention import Iteration, register
from pensieve.device.batch import BlockTables, build_batch
from pensieve.device.fused import packed
from pensieve.device.fused.decoder import FusedModel, build_fused
from pensieve.device.fused.packed import FEW_ROWS, FewRows, RowKernels, packable, packed_products, serves
from pensieve.device.kernels.native import NativeBackend
from pensieve.device.kv_tensors import KvTensors
from pensieve.device.model import load_model
from pensieve.device.self_check import check_against_eager
from pensieve.device.weights import _random
from pensieve.errors import EngineMissing
from pensieve.specs import ModelSpec

from .driver import ARCHITECTURES, plain_logits, tiny_model, tiny_spec

CHUNK = 8
PACKED = "packed weights, few rows in C"


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_equals_transformers(name, model_of):
    """By the self-check: of what serves when the model was loaded, and here of weights that are joined and not packed."""
    model = model_of(name)
    fused = build_fused(module := copy.deepcopy(model.module), pack=False)
    assert isinstance(fused, FusedModel) == (name not in ("gpt2", "opt")) == (not model.forward_note)
    kind = "fused" if isinstance(fused, FusedModel) else "transformers"
    assert model.forward.name == (f"{kind}, {PACKED}" if serves(torch.float32) else kind)
    assert not any("forward" in vars(each) for each in model.module.modules()), "alone the module is transformers'"
    if kind == "fused":
        assert not fused.packed and check_against_eager(module, fused, model.spec, model.device).difference < 1e-4


@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_joined_weights_exist_once(name, model_of, tmp_path):
    """The module's parameters are views of the joined ones, say the same as before, and can still be saved."""
    module = copy.deepcopy(model_of(name).module)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    memory = _storage_bytes(module)
    if name == "qwen2":
        assert isinstance(build_fused(module, pack=False), FusedModel)
    elif serves(torch.float32):
        assert len(packed_products(module)) == 2 * 4 + 1
    assert _storage_bytes(module) == memory
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert not any(p.requires_grad for p in module.parameters() if p.dim() == 2)
    module.save_pretrained(tmp_path)
    spec = ModelSpec.from_architecture(name, module.config.to_dict())
    again = load_model(ModelAsked(spec, weights=str(tmp_path), threads=1))
    assert torch.equal(plain_logits(again, [5, 6, 7]), plain_logits(model_of(name), [5, 6, 7]))


def _storage_bytes(module):
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in module.parameters()}
    return sum(storages.values())


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_weights_that_onednn_multiplies_here_and_that_fit_twice_are_packed(llama, monkeypatch):
    """The limit alone decides, not what the process holds, which earlier trials left: the same trial would have another
    speed. Without a limit it is what the machine has free."""
    for here in (True, False):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda here=here: here)
        assert packable(copy.deepcopy(llama.module).to(torch.bfloat16)) is (here and serves(torch.bfloat16))
    assert not packable(copy.deepcopy(llama.module).to(torch.float16)), "only a type that C multiplies too"
    enough = 5 * sum(weight.nbytes for weight in llama.module.parameters())
    for ballast, available in ((0, 2**40), (2**40, llama.spec.weight_bytes)):
        held = type("Resident", (), {"rss": ballast, "vms": ballast, "available": available, "total": 2**40})
        monkeypatch.setattr(psutil.Process, "memory_info", lambda self, held=held: held)
        monkeypatch.setattr("pensieve.device.fused.packed.psutil.virtual_memory", lambda held=held: held)
        for limit, fits in ((enough, True), (enough - 1, False), (None, ballast == 0)):
            assert packable(llama.module, limit) is (fits and serves(torch.float32))
    assert tiny_model("llama").forward.name == "fused"

    def missing(*given):
        raise EngineMissing("no compiler")

    monkeypatch.setattr(packed, "load_library", missing)
    assert not packable(llama.module, enough)


def test_what_has_no_fused_forward_runs_on_transformers():
    for changed, words in (
        ({"model_type": "phi3", "pad_token_id": 0, "eos_token_id": 2}, "none for phi3"),
        ({"hidden_act": "mish"}, "activation mish"),
    ):
        spec = ModelSpec.from_architecture("other", {**ARCHITECTURES["llama"], **changed})
        model = load_model(ModelAsked(spec, threads=1))
        assert model.forward.name.startswith("transformers") and words in model.forward_note
    module = tiny_model("llama").module
    del module.model.layers[0].self_attn.scaling  # of another make
    assert "scaling" in build_fused(module, pack=False)


@pytest.mark.parametrize("name", ["gemma2", "llama"])
def test_a_norm_with_trained_weights(name: str) -> None:
    """In bfloat16, as on a GPU, transformers' own. Gemma's weights are added to 1: that sum would keep 7 bits of them."""
    register()
    module = _random(tiny_spec(name), torch.bfloat16, torch.device("cpu"), 0).eval().requires_grad_(False)
    layer = module.model.layers[0]
    layer.input_layernorm.weight.copy_(torch.randn(64) * 0.3 + (name == "llama"))
    fused = build_fused(module, pack=False)
    assert not isinstance(fused, str)
    x = torch.randn(50, 64, dtype=torch.bfloat16)
    got, expected = fused.layers[0].before_attention(x), layer.input_layernorm(x)  # type: ignore[attr-defined]
    assert got.dtype == torch.bfloat16
    differing = float((got != expected).float().mean())
    assert differing < (0.001 if name == "gemma2" else 0.5), "Llama's rounds once more than one kernel does"
    torch.testing.assert_close(got.float(), expected.float(), rtol=2**-7, atol=1e-6)


# -- in C -------------------------------------------------------------------------------------------------------------------

try:
    find_compiler()
    missing = ""
except EngineMissing as error:
    missing = str(error)
needs_compiler = pytest.mark.skipif(bool(missing), reason=missing)


def _noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@needs_compiler
@pytest.mark.parametrize(
    ("processor", "dtype"),
    [("this", torch.float32), ("this", torch.bfloat16), ("zen 3", torch.bfloat16), ("any", torch.float32)],
)
def test_a_product_is_that_of_its_weights_on_any_processor_and_other_rows_change_nothing(processor, dtype, compile_for):
    """Compilers round a product and its sum once or twice as they think fit for each number of rows, if they may."""
    if processor != "this":
        compile_for(processor)
    for inside, outside in ((576, 97), (40, 64), (77, 3), (16, 1), (5, 130)):
        weights, bias = _noise(outside, inside, seed=101).to(dtype), _noise(outside, seed=103).to(dtype)
        x = _noise(FEW_ROWS, inside).to(dtype)
        for added in (bias, None):
            product = FewRows(weights, added)
            exact = x.double() @ weights.double().t() + (0 if added is None else added.double())
            alone = torch.cat([product(row[None]) for row in x])
            rounding = 2**-8 * exact.abs() if dtype == torch.bfloat16 else 0  # once, of the result
            assert bool(((alone - exact).abs() <= 2e-6 * inside**0.5 + rounding).all())
            for rows in range(2, FEW_ROWS + 1):
                assert torch.equal(product(x[:rows]), alone[:rows])
    turned = _noise(5, 3).to(dtype).t()
    assert torch.equal(product(turned), product(turned.contiguous()))


@needs_compiler
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


@needs_compiler
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


@needs_compiler
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
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
