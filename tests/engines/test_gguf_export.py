"""The exported file holds the very weights, under llama.cpp's names and in its order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pensieve.errors import UnsupportedModel
from pensieve.plugins.engines.weights import gguf_file, model_folder, plain_module, refuse_family, write_gguf
from tests.engines.small import ARCHITECTURES, setup_of

gguf = pytest.importorskip("gguf")


def written(family: str, folder: Path, file_type: str = "f32") -> tuple[object, dict[str, np.ndarray], object]:
    module = plain_module(setup_of(family))
    file = folder / "model.gguf"
    write_gguf(module, family, file, file_type)
    reader = gguf.GGUFReader(file)
    return module, {tensor.name: tensor.data for tensor in reader.tensors}, reader


@pytest.mark.parametrize("family", ["llama", "tied_llama", "gpt2"])
def test_every_weight_is_there_once(family: str, tmp_path: Path) -> None:
    module, tensors, reader = written(family, tmp_path)
    tied = ARCHITECTURES[family].get("tie_word_embeddings", True)
    assert sum(values.size for values in tensors.values()) == sum(p.numel() for p in module.parameters())
    assert ("output.weight" in tensors) is not tied
    total = sum(float(np.abs(values.astype("float64")).sum()) for values in tensors.values())
    assert total == pytest.approx(sum(float(p.double().abs().sum()) for p in module.parameters()))
    assert len(reader.fields["tokenizer.ggml.tokens"].data) == ARCHITECTURES[family]["vocab_size"]


@pytest.mark.parametrize(
    ("architecture", "part"),
    [
        (ARCHITECTURES["opt"], "this is opt"),
        ({**ARCHITECTURES["llama"], "rope_scaling": {"rope_type": "llama3"}}, "llama3"),
        ({**ARCHITECTURES["llama"], "attention_bias": True}, "attention_bias"),
    ],
)
def test_what_cannot_be_written_is_refused_in_a_sentence(architecture: dict[str, object], part: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        refuse_family("some", architecture)
    assert part in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_is_written_once_and_again_for_other_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = gguf_file(setup_of("llama"), "f32")
    written_at = first.stat().st_mtime_ns
    assert gguf_file(setup_of("llama"), "f32") == first and first.stat().st_mtime_ns == written_at
    others = {gguf_file(setup_of("llama", seed=4), "f32"), gguf_file(setup_of("llama"), "f16")}
    assert len(others | {first}) == 3


def test_a_folder_holds_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = model_folder(setup_of("llama"))
    again = plain_module(setup_of("llama", weights=str(folder)))
    assert model_folder(setup_of("llama", weights=str(folder))) == folder
    for (name, one), two in zip(plain_module(setup_of("llama")).named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two), name
