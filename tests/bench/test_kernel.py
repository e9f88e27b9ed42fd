import pytest
import torch

from pensieve.compiler import find_compiler
from pensieve.device.kernels.reference import ReferenceBackend
from pensieve.errors import EngineMissing
from pensieve.lab.bench.kernel import Runs, Shape, contiguous, find_backends, make_inputs, paged

SHAPE = Shape(heads=4, kv_heads=2, dim=16, chunk=8)
CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [[[(40, 41)]] * 3, [[(40, 48)]] * 2], ids=str)
def test_all_ways_of_attending_do_the_same_work(rows: list[Runs]) -> None:
    inputs = make_inputs(rows, SHAPE, CPU, torch.float32, seed=0, layers=2)
    with torch.inference_mode():
        first, other = paged(ReferenceBackend(), inputs)(), contiguous(inputs)()
    assert first.shape == inputs.queries.shape and torch.allclose(first, other, atol=1e-5)


def test_inputs_lie_beyond_the_caches_and_count_shared_keys_once() -> None:
    inputs = make_inputs([[(0, 8), (16, 30)], [(3, 4)]], SHAPE, CPU, torch.float32, seed=0)
    assert inputs.kv_bytes == (30 + 4) * 2 * 2 * 16 * 4
    assert inputs.layers == 32
    assert not inputs.pool.isnan().any()


def test_on_a_cpu_the_compiled_one_serves_beside_the_reference() -> None:
    try:
        find_compiler()
    except EngineMissing as missing:
        pytest.skip(str(missing))
    backends, absent = find_backends(CPU, torch.float32, SHAPE)
    assert {name: backend.name for name, backend in backends.items()} == {"ours": "native", "reference": "reference"}
    assert not absent


def test_without_a_compiler_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    backends, absent = find_backends(CPU, torch.float32, Shape(heads=2, kv_heads=1, dim=24, chunk=8))
    assert [backend.name for backend in backends.values()] == ["reference"]
    assert "no-such-compiler is not one" in absent["native"]
