import json

import pytest

from pensieve.errors import ConfigError, WeightsMissing
from pensieve.lab.compose.conf import options, outputs_folder, read_option
from pensieve.lab.compose.model_files import check_weights, model_config

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 320,
    "intermediate_size": 64, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


def test_a_hub_id_without_network_is_a_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("pensieve.hub._answers", {})
    with pytest.raises(
        WeightsMissing, match=r"architecture of nobody/nothing-at-all.*HF_HUB_OFFLINE is set; use a folder"
    ):
        model_config("nobody/nothing-at-all")
    with pytest.raises(WeightsMissing, match=r"HF_HUB_OFFLINE.*model\.weights=random"):
        check_weights(model_config("gpt2", hub_id="nobody/nothing-at-all"))


def test_options_are_read_without_hydra():
    assert read_option("cache", "small")["gpu"] == "2GB"
    assert "tiny" in options("model")
    with pytest.raises(ConfigError, match=r"no cache 'smal'; did you mean small\?"):
        read_option("cache", "smal")


def test_outputs_can_be_moved(monkeypatch, tmp_path):
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path / "x"))
    assert outputs_folder() == tmp_path / "x"
    monkeypatch.delenv("PENSIEVE_OUTPUTS")
    assert outputs_folder().name == "outputs"
    monkeypatch.chdir(tmp_path)
    assert outputs_folder() != tmp_path / "outputs"  # anchored at the checkout
