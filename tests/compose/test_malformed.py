"""Damaged model files: a sentence within a second, or a model that still loads; nothing else."""

import json
import struct
from time import process_time

import pytest
import torch

from pensieve.device.asked import ModelAsked
from pensieve.device.weights import load_module
from pensieve.errors import PensieveError
from pensieve.lab.compose.model_files import build_tokenizer, check_weights, model_config, own_folder
from pensieve.specs import ModelSpec
from tests.tiny_gguf import write_gguf

pytest.importorskip("gguf")
pytest.importorskip("accelerate")


def load(source):
    """All that a start reads of a model."""
    model = model_config(str(source))
    check_weights(model)
    spec = ModelSpec.from_architecture(model.name, model.architecture)
    build_tokenizer(model, spec.vocab, simulated=False)
    load_module(ModelAsked(spec, str(own_folder(model))), torch.device("cpu"))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """The files of a model, and the GGUF file that they were made of. They load."""
    from pensieve.device.weights import dequantise

    with pytest.MonkeyPatch.context() as patch:
        at = tmp_path_factory.mktemp("good")
        patch.setenv("XDG_CACHE_HOME", str(at / "cache"))
        source = write_gguf(at / "m.gguf")
        (at / "folder").mkdir()
        dequantise(source, at / "folder")
        load(at / "folder")
        load(source)
        return {file.name: file.read_bytes() for file in [*(at / "folder").iterdir(), source]}


def ends_well(folder, files, damaged, monkeypatch):
    """The sentence, None for a model that loads."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    for name, content in files.items():
        (folder / name).write_bytes(content)
    began = process_time()
    try:
        load(folder / damaged if damaged.endswith(".gguf") else folder)
    except PensieveError as error:
        assert process_time() - began < 1.0
        return str(error)
    return None


def with_fields(**fields):
    return lambda content: json.dumps({**json.loads(content), **fields}).encode()


def with_number(key, value):
    """A GGUF file's own number: behind its key and the number of its type."""

    def edit(content):
        at = content.index(key) + len(key) + 4
        return content[:at] + struct.pack("<I", value) + content[at + 4 :]

    return edit


def at_place(place, value):
    return lambda content: content[:place] + struct.pack("<Q", value) + content[place + 8 :]


def nested_arrays(content):
    one = struct.pack("<Q", 1) + b"x" + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100_000
    return content[:16] + struct.pack("<Q", 21) + one + content[24:]


def instead(content):
    return lambda _: content


@pytest.mark.parametrize(
    ("name", "edit", "words"),
    [
        ("m.gguf", with_number(b"llama.block_count", 1_000_000), "parameters"),
        ("m.gguf", at_place(16, 2**60), "not a whole GGUF file"),
        ("m.gguf", nested_arrays, "not a whole GGUF file"),
        ("m.gguf", lambda content: content[:-200], "not a whole GGUF file"),
        ("config.json", instead(b"[" * 100_000), "config.json cannot be read"),
        ("config.json", with_fields(num_hidden_layers=1_000_000), "parameters"),
        ("config.json", with_fields(hidden_size=float("inf")), "is not that of a decoder-only"),
        ("config.json", with_fields(hidden_act="no_such"), "no_such"),
        ("config.json", with_fields(eos_token_id="end"), "eos_token_id='end'"),
        ("config.json", with_fields(sliding_window="wide", model_type="mistral"), "sliding_window"),
        ("config.json", with_fields(rope_parameters=7), "rope_parameters"),
        ("config.json", with_fields(model_type=["llama"]), "transformers can load here"),
        ("config.json", with_fields(dtype="no_such"), "no_such"),
        ("model.safetensors", at_place(0, 2**63), "are damaged"),
        ("model.safetensors", instead(struct.pack("<Q", 2) + b"[]"), "are damaged"),
        ("model.safetensors.index.json", instead(b"{}"), "weight_map"),
        ("model.safetensors.index.json", instead(b'{"metadata": {}, "weight_map": {"a": "gone.safetensors"}}'), "gone"),
        ("tokenizer.json", instead(b"[" * 100_000), "not a readable tokenizer"),
        ("tokenizer_config.json", instead(b"{" * 100_000), "not readable"),
        ("chat_template.jinja", instead(b"\xff\xfe"), "not readable"),
        ("generation_config.json", with_fields(eos_token_id={"a": 1}), "names no token ids"),
    ],
)
def test_damage_of_a_kind_is_named(name, edit, words, good, tmp_path, monkeypatch):
    files = {**good, name: edit(good.get(name, b""))}
    if name.endswith("index.json"):
        del files["model.safetensors"]
    sentence = ends_well(tmp_path, files, name, monkeypatch)
    assert sentence is not None and words in sentence and "\n" not in sentence, sentence
