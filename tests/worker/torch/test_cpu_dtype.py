"""What model.dtype=auto is on a CPU: which machines are measured, what is remembered, and how it is decided."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pensieve.worker.torch import cpu_dtype
from pensieve.worker.torch.cpu_dtype import Measured, has_units, measure, products

from .driver import ARCHITECTURES, tiny_spec

LARGE = replace(tiny_spec("llama"), name="large", hidden=1024, intermediate=4096, vocab=8192)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu_dtype, "processor", lambda: "flags : fma avx2 amx_bf16 amx_tile")
    return tmp_path


def _answers(monkeypatch: pytest.MonkeyPatch, *answers: Measured) -> list[Measured]:
    left = list(answers)
    monkeypatch.setattr(cpu_dtype, "measure", lambda _: left.pop(0))
    return left


@pytest.mark.parametrize(
    ("said", "there"),
    [
        ("flags : fma avx2 avx512f avx512_vnni", False),
        ("flags : avx512f avx512_bf16 avx512_fp16", True),
        ("flags : amx_bf16 amx_tile", True),
        ("Features : asimd svebf16 bf16", True),
    ],
)
def test_which_processors_have_units_for_bfloat16(said: str, there: bool) -> None:
    assert has_units(said) is there


def test_without_such_units_nothing_is_measured(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_dtype, "processor", lambda: "flags : fma avx2")
    _answers(monkeypatch)
    assert cpu_dtype.cpu_dtype(LARGE) == "float32"
    assert not list(cache.iterdir())


def test_a_small_model_is_float32_on_every_machine(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _answers(monkeypatch)
    assert cpu_dtype.cpu_dtype(tiny_spec("llama")) == "float32"


@pytest.mark.parametrize(
    ("times", "chosen"),
    [((2, 1, 20, 10), "bfloat16"), ((2, 1, 10, 20), "float32"), ((1, 2, 20, 10), "float32"), ((1, 1, 9, 9), "float32")],
)
def test_it_has_to_be_faster_in_decode_and_in_prefill(times: tuple[float, ...], chosen: str) -> None:
    assert Measured(*times).faster == chosen


def test_a_machine_is_asked_once_a_model(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = _answers(monkeypatch, Measured(2, 1, 20, 10), Measured(1, 2, 10, 20))
    assert [cpu_dtype.cpu_dtype(LARGE) for _ in range(3)] == ["bfloat16"] * 3
    assert len(left) == 1
    assert cpu_dtype.cpu_dtype(replace(LARGE, hidden=512)) == "float32", "other matrices are other measurements"


def test_a_torn_answer_is_measured_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _answers(monkeypatch, Measured(2, 1, 20, 10), Measured(1, 2, 10, 20))
    cpu_dtype.cpu_dtype(LARGE)
    [file] = (cache / "pensieve" / "dtype").iterdir()
    file.write_text(file.read_text()[:-3])
    assert cpu_dtype.cpu_dtype(LARGE) == "float32"
    assert json.loads(file.read_text())["decode_bfloat16"] == 2


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_what_is_measured_are_the_products_of_the_model(name: str) -> None:
    spec = tiny_spec(name)
    numbers = sum(inside * outside * count for inside, outside, count in products(spec))
    assert numbers == spec.layers * spec.layer_parameters + spec.vocab * spec.hidden


def test_both_types_are_measured_over_both_kinds_of_rows() -> None:
    times = measure(products(tiny_spec("llama")))
    assert min(times.decode_float32, times.decode_bfloat16, times.prefill_float32, times.prefill_bfloat16) > 0
