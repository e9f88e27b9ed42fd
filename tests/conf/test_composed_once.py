"""What tests are given read once follows the files."""

from hydra import compose, initialize_config_dir

from pensieve.lab.compose import read_option


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
