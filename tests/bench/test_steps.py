import pytest
import torch

from pensieve.device.worker import TorchOptions
from pensieve.lab.bench import steps
from pensieve.lab.bench.steps import Stepper, plain_module, prompt
from tests.bench.bench import make_bench
from tests.worker.torch.driver import tiny_model, tiny_spec


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def test_floors_read_all_weights_and_kv_once_or_do_all_operations():
    spec = tiny_spec("llama")
    weights = 4 * (spec.read_parameters(1) + 97 * 64)
    by_memory = steps.floor_ms(spec, 3, 40, copy_bytes_s=1e6, matrix_flops_s=1e15)
    assert by_memory == pytest.approx((weights + 3 * 41 * spec.kv_bytes_per_token) / 1e6 * 1e3)
    operations = 3 * (2 * spec.read_parameters(1) + 2 * 97 * 64 + 41 * spec.attention_flops_per_pair)
    assert steps.floor_ms(spec, 3, 40, copy_bytes_s=1e15, matrix_flops_s=1e6) == pytest.approx(operations / 1e3)
    pairs = 10 * 11 // 2
    assert steps.operations(spec, 10) == 10 * 2 * spec.read_parameters(1) + 4 * 2 * 4 * 16 * pairs + 2 * 97 * 64


def test_the_stepper_computes_what_the_plain_model_computes(model):
    stepper = Stepper(model, 3, 70, TorchOptions())
    stepper.fill()
    assert stepper.decode(2, steps=1) > 0
    token = stepper.tokens[1]
    stepper.worker.close()
    ids = prompt(1, 70, 97)
    module = plain_module(model)
    with torch.inference_mode():
        for _ in range(2):  # the token that follows the prompt, then the one that a decode step gave
            ids = (*ids, int(module(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    assert token == ids[-1]


def test_decode_and_prefill_stand_beside_their_peers(model, tmp_path, monkeypatch):
    bench = make_bench("decode", tmp_path, repeats=1)
    monkeypatch.setattr(steps, "load", lambda bench: model)
    monkeypatch.setitem(steps._DECODES, "cpu", ((2, 40),))
    monkeypatch.setattr(type(bench), "measure_limits", lambda self: None)
    steps.run_decode(bench)
    assert bench.gaps == []
    (result,) = bench.results["decode"]
    assert [m.backend for m in result.measured] == ["ours", "transformers"]
    assert all(m.values for m in result.measured), [m.error for m in result.measured]
    assert result.measured[0].engine["engine"] == "torch"
    monkeypatch.setitem(steps._PREFILLS, "cpu", (48,))
    bench.target = "prefill"
    steps.run_prefill(bench)
    assert bench.gaps == []
    assert [m.backend for m in bench.results["prefill"][0].measured] == ["ours", "transformers"]
