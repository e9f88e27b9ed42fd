"""What tests are given composed once is what Hydra composes, and follows the files."""

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from pensieve.lab.compose import read_option
from tests import composed_once
from tests.composed import hydra_session


def whole(overrides):
    with hydra_session():
        return OmegaConf.to_yaml(compose(config_name="config", overrides=overrides, return_hydra_config=True))


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ([], ["seed=3", "hydra.job.chdir=true"]),
        (["eviction=lru", "cache.gpu=4096 tokens"], ["eviction=lru", "~trial.trace", "+workload.own=1"]),
    ],
)
def test_the_same_options_with_other_fields_are_what_hydra_composes(first, then, monkeypatch):
    whole(first)
    again = whole(then)
    with monkeypatch.context() as patch:
        patch.setattr(composed_once, "_state", lambda file: object())  # a file is never the same
        assert whole(then) == again
    assert whole(then) == again != whole(first)


def test_a_file_that_is_written_again_is_read_again(tmp_path):
    (tmp_path / "group").mkdir()
    (tmp_path / "main.yaml").write_text("defaults: [group: one, _self_]")
    for text, value in (("field: 1", 1), ("field: 12", 12)):
        (tmp_path / "group" / "one.yaml").write_text(text)
        with initialize_config_dir(config_dir=str(tmp_path), version_base="1.3"):
            assert compose("main").group.field == value


def test_what_is_read_once_is_nobody_elses():
    read_option("cache", "demo")["gpu"] = "changed"
    assert read_option("cache", "demo")["gpu"] != "changed"
