"""The tokenizer of a configured model, in the layouts that models are published in."""

import json

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from pensieve.errors import WeightsMissing
from pensieve.lab.compose.model_files import ModelConfig, build_tokenizer, has_tokenizer, model_config, read_tokenizer
from tests.chat import LLAMA_3, MERGES, save_tokenizer
from tests.hub_cache import fill, unreachable

OPT = {"model_type": "opt", "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1, "vocab_size": 300}


def save_opt(folder):
    """As facebook/opt-125m is published: no tokenizer.json, and </s> before every text."""
    folder.mkdir(exist_ok=True)
    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    pieces = [*specials, *sorted(ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    (folder / "vocab.json").write_text(json.dumps({piece: number for number, piece in enumerate(pieces)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in MERGES) + "\n")
    token = {"__type": "AddedToken", "lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
    names = {"bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "</s>"}
    settings = {name: {**token, "content": text} for name, text in names.items()}
    settings |= {
        "add_bos_token": True,
        "add_prefix_space": False,
        "errors": "replace",
        "tokenizer_class": "GPT2Tokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(OPT))
    return folder


def test_opt_without_a_tokenizer_json(tmp_path):
    from transformers import AutoTokenizer

    folder = save_opt(tmp_path / "opt")
    assert has_tokenizer(folder)
    tokenizer = read_tokenizer(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    text = "the stone, one\n"
    assert [*tokenizer.begin, *tokenizer.encode(text)] == theirs(text)["input_ids"]
    assert tokenizer.begin == (2,) and tokenizer.eos_ids == {2}
    assert tokenizer.decode(theirs(text)["input_ids"]) == text
    assert tokenizer.chat_template is None


def test_sentencepiece(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    from transformers import AutoTokenizer

    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"the one stone is number {n} of the many stones, and then some" for n in range(200)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "tokenizer"), vocab_size=320, model_type="bpe", byte_fallback=True,
        minloglevel=2, bos_id=1, eos_id=2, unk_id=0, pad_id=-1,
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "bos_token_id": 1, "eos_token_id": 2}))
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "unk_token": "<unk>", "legacy": False}))
    assert not (tmp_path / "tokenizer.json").exists()
    tokenizer = read_tokenizer(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    said = "the one stone"
    assert [*tokenizer.begin, *tokenizer.encode(said)] == theirs(said)["input_ids"]
    assert tokenizer.begin == (1,) and tokenizer.eos_ids == {2}
    assert tokenizer.decode(tokenizer.encode(said)).strip() == said


def test_every_end_that_the_settings_name_ends_a_reply(tmp_path):
    folder = save_tokenizer(tmp_path / "llama", LLAMA_3)
    assert len(read_tokenizer(folder).eos_ids) == 1
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert read_tokenizer(folder, eos_ids=(5,)).eos_ids >= {5, 7, 9}


@pytest.mark.parametrize(("name", "layout"), [("llama3_8b_instruct", "json"), ("opt_13b", "opt")])
def test_presets_load_their_own_tokenizer_and_template(tmp_path, monkeypatch, name, layout):
    unreachable(monkeypatch, tmp_path / "hub")
    model = model_config(name)
    published = save_opt(tmp_path / "x") if layout == "opt" else save_tokenizer(tmp_path / "x", LLAMA_3, begins=True)
    assert model.weights == "hub" and model.hub_id is not None
    fill(tmp_path / "hub", model.hub_id, published)
    tokenizer = build_tokenizer(model, int(model.architecture["vocab_size"]), simulated=False)
    assert tokenizer.name == model.hub_id
    assert (tokenizer.chat_template is None) == (layout == "opt")
    assert model.architecture["eos_token_id"] in tokenizer.eos_ids


def test_random_weights_take_bytes_where_nothing_is_at_hand(tmp_path, monkeypatch):
    asked = unreachable(monkeypatch, tmp_path / "hub")
    random = model_config("gpt2", weights="random")
    assert build_tokenizer(random, 50257, simulated=False).name == "bytes"
    assert build_tokenizer(model_config("gpt2"), 50257, simulated=True).name == "bytes"
    assert asked == [], "random weights and simulations download nothing"
    with pytest.raises(WeightsMissing, match="tokenizer"):
        build_tokenizer(random, 258, simulated=False)
    with pytest.raises(WeightsMissing, match=r"tokenizer of openai-community/gpt2.*model\.tokenizer=bytes"):
        build_tokenizer(model_config("gpt2"), 50257, simulated=False)


def test_a_folder_without_a_tokenizer_says_what_to_do(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(OPT))
    mine = ModelConfig(name="mine", weights=str(tmp_path), architecture=OPT)
    with pytest.raises(WeightsMissing, match=r"no tokenizer in .*model\.tokenizer=bytes"):
        build_tokenizer(mine, 320, simulated=False)
    elsewhere = mine.model_copy(update={"tokenizer": str(save_tokenizer(tmp_path / "other"))})
    assert build_tokenizer(elsewhere, 320, simulated=False).name == "other"
    (tmp_path / "vocab.json").write_text("{")
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(WeightsMissing, match="no tokenizer that transformers can read"):
        build_tokenizer(mine, 320, simulated=False)
