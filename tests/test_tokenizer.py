import json

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from pensieve.errors import WeightsMissing
from pensieve.serve.tokenizer import ByteTokenizer, HubTokenizer


@pytest.fixture
def folder(tmp_path):
    backend = Backend(WordLevel({"hello": 0, "world": 1, "<end>": 2, "[UNK]": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()
    backend.add_special_tokens(["<end>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_bytes_come_back():
    tokenizer = ByteTokenizer()
    text = "Grüße, 世界"
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == 259


def test_any_ids_decode():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([0xC3]) == "\ufffd"
    assert tokenizer.decode([72, 257, 105, 319]) == "Hi"


def test_hub_tokenizer_reads_a_folder(folder):
    tokenizer = HubTokenizer(folder)
    assert tokenizer.encode("hello world") == [0, 1]
    assert tokenizer.decode([1, 0, 2]) == "world hello"
    assert tokenizer.vocab_size == 4
    assert tokenizer.eos_ids == frozenset()


def test_end_of_sequence_is_read_beside_it(folder):
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    assert HubTokenizer(folder).eos_ids == {2}
    assert HubTokenizer(folder, eos_ids=[1]).eos_ids == {1, 2}


def test_a_malformed_file_is_a_sentence(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(WeightsMissing, match="not a readable tokenizer"):
        HubTokenizer(tmp_path)
