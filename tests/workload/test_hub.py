import sys
from types import SimpleNamespace

import pytest

from pensieve.errors import EngineMissing, MalformedInput
from pensieve.lab.workload.sharegpt import load_from_hub

ROWS = [{"id": "a", "data": ["Hi", "Hello"]}, {"id": "b", "other": 1}]


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(EngineMissing, match=r"owner/set is no file here.*pip install datasets"):
        load_from_hub("owner/set", "train", "fail")


def test_rows_are_read_like_entries_of_a_file(monkeypatch):
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        return ROWS

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    recording = load_from_hub("owner/set", "test", "skip")
    assert asked == [("owner/set", "test")]
    assert [one.id for one in recording.conversations] == ["a"]
    assert recording.examples == ("owner/set (test): entry 2: it has none of conversations, messages and data",)
    with pytest.raises(MalformedInput, match="entry 2"):
        load_from_hub("owner/set", "test", "fail")


def test_a_set_that_cannot_be_had(monkeypatch):
    def load_dataset(name, split):
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(
        MalformedInput, match=r"owner/set \(split train\) cannot be loaded from the hub: no route. workload.path also"
    ):
        load_from_hub("owner/set", "train", "fail")
