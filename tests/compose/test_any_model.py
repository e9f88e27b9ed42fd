"""model=hf: any decoder, by hub id or folder; and what of its weights identifies a trial."""

import pytest

from pensieve import create_server
from pensieve.errors import UnsupportedModel, WeightsMissing
from pensieve.lab.compose.model_files import check_weights, local_weights
from pensieve.lab.compose.plan import plan_trial
from pensieve.lab.compose.settings import resolved
from pensieve.lab.trial.job import identity_of
from tests.chat import CHATML, save_tokenizer
from tests.composed import checked, composed
from tests.hub_cache import fill, unreachable

MISTRAL = {
    "model_type": "mistral", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 320, "max_position_embeddings": 256, "sliding_window": None,
}  # fmt: skip


def save_model(folder, seed=0):
    """A small Mistral with weights, tokenizer and template, as somebody may have trained it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    architecture = {**MISTRAL, "initializer_range": 0.19}
    torch.manual_seed(seed)
    config = AutoConfig.for_model(architecture.pop("model_type"), **architecture)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return save_tokenizer(folder, CHATML)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "mine")


def test_a_folder(folder):
    for given in ("model.hub_id", "model.weights"):
        config = checked("model=hf", f"{given}={folder}")
        assert (config.model.name, config.model.weights, config.model.hub_id) == ("mine", str(folder), None)
        assert config.model.architecture["model_type"] == "mistral"
        check_weights(config.model)
    random = checked("model=hf", f"model.hub_id={folder}", "model.weights=random").model
    assert (random.weights, random.tokenizer) == ("random", str(folder))


def test_a_hub_id_in_the_cache(folder, tmp_path, monkeypatch):
    asked = unreachable(monkeypatch, tmp_path)
    snapshot = fill(tmp_path, "org/name", folder)
    config = checked("model=hf", "model.hub_id=org/name", "hardware=cpu")
    assert (config.model.name, config.model.weights) == ("org--name", "hub")
    assert plan_trial(config).model.kv_heads == 2
    check_weights(config.model)
    assert local_weights(config.model) == snapshot / "model.safetensors"
    with create_server(model="org/name", device="cpu", gpu_cache="256 tokens", cpu_cache="256 tokens") as server:
        said = server.generate("a", text="the one", max_new_tokens=12, ignore_eos=True)
        engine = server.get_statistics()["engine"]
    assert engine["tokenizer"] == "org/name"
    assert len(set(said.token_ids)) > 3
    assert asked == []


def test_the_commit_of_its_weights_is_part_of_a_real_trial(folder, tmp_path, monkeypatch):
    def fingerprint(hardware):
        overrides = ("model=hf", "model.hub_id=org/name", f"hardware={hardware}", "cache.gpu=256 tokens")
        return identity_of(plan_trial(checked(*overrides)), resolved(composed(*overrides))).fingerprint

    unreachable(monkeypatch, tmp_path)
    fill(tmp_path, "org/name", folder)
    real, simulated = fingerprint("cpu"), fingerprint("sim_h100")
    assert fingerprint("cpu") == real
    fill(tmp_path, "org/name", folder, commit="f" * 40)
    assert fingerprint("cpu") != real, "another commit is another model"
    assert fingerprint("sim_h100") == simulated, "a simulation loads no weights"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "t5", "d_model": 64, "num_layers": 2}, r"org--name \(t5\) cannot be served"),
        ({"architectures": ["X"]}, r"org--name \(no model_type\) cannot be served"),
    ],
)
def test_what_is_no_decoder_is_refused_before_anything_is_loaded(tmp_path, monkeypatch, config, says):
    unreachable(monkeypatch, tmp_path)
    fill(tmp_path, "org/name", {"config.json": config})
    with pytest.raises(UnsupportedModel, match=says) as caught:
        checked("model=hf", "model.hub_id=org/name")
    assert str(caught.value).count(". ") == 0


@pytest.mark.parametrize("place", ["/nowhere/model", "./model", "name", "a/b/c"])
def test_what_is_neither_folder_nor_hub_id_is_refused_without_asking(place, tmp_path, monkeypatch):
    asked = unreachable(monkeypatch, tmp_path)
    with pytest.raises(WeightsMissing, match="no folder on this machine, and no hub id"):
        checked("model=hf", f"model.hub_id={place}")
    assert asked == []
