"""What is asked of the hub, and how often."""

from types import SimpleNamespace

import pytest

from pensieve import hub
from pensieve.errors import WeightsMissing
from pensieve.lab.compose.model_files import check_weights, model_config
from tests.hub_cache import COMMIT, fill, unreachable


def test_a_repository_in_the_cache_is_read_without_asking(tmp_path, monkeypatch):
    asked = unreachable(monkeypatch, tmp_path)
    folder = fill(tmp_path, "org/name", {"config.json": {}})
    assert hub.cached_snapshot("org/name") == folder
    assert hub.commit("org/name") == COMMIT
    assert hub.settings_folder("org/name", None, lambda at: (at / "config.json").is_file(), "It", "stop") == folder
    assert hub.cached_snapshot("org/other") is None and hub.commit("org/other") is None
    assert hub.cached_snapshot("no id at all/../") is None
    assert asked == []


def test_an_unknown_model_is_asked_for_once_whatever_is_wanted_of_it(tmp_path, monkeypatch):
    asked = unreachable(monkeypatch, tmp_path)
    for wanted in (
        lambda: model_config("nobody/nothing"),
        lambda: model_config("nobody/nothing"),
        lambda: check_weights(model_config("gpt2", hub_id="nobody/nothing")),
        lambda: hub.settings_folder("nobody/nothing", None, lambda at: True, "The tokenizer", "stop"),
    ):
        with pytest.raises(WeightsMissing, match=r"nobody/nothing cannot be had: .*cannot be reached \(Conn"):
            wanted()
    assert asked == ["nobody/nothing"]


@pytest.mark.parametrize(
    ("failure", "says"),
    [("GatedRepoError", "licence must be accepted"), ("RevisionNotFoundError", "has no revision v9")],
)
def test_a_kind_of_refusal_has_its_own_sentence_before_those_of_wider_kinds(tmp_path, monkeypatch, failure, says):
    from huggingface_hub import errors

    error = getattr(errors, failure)("no", response=SimpleNamespace(headers={}, request=None))
    unreachable(monkeypatch, tmp_path, error)
    assert says in str(hub.why_not("org/name", "v9"))


def test_a_cached_repository_without_what_is_wanted_says_so(tmp_path, monkeypatch):
    asked = unreachable(monkeypatch, tmp_path)
    fill(tmp_path, "org/name", {"config.json": {}})
    with pytest.raises(WeightsMissing, match=r"The tokenizer of org/name cannot be had.*; stop\."):
        hub.settings_folder("org/name", None, lambda at: (at / "tokenizer.json").is_file(), "The tokenizer", "stop")
    assert asked == ["org/name"]
