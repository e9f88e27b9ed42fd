"""What the configurations do to logging: warnings reach the terminal, and no logger is silenced."""

import logging
from logging.config import dictConfig

import pytest
from hydra import compose
from omegaconf import OmegaConf

from tests.composed import hydra_session


@pytest.fixture
def root():
    """The root logger, as it was afterwards."""
    found = logging.getLogger()
    handlers, level = found.handlers[:], found.level
    yield found
    found.handlers[:], found.level = handlers, level


@pytest.mark.parametrize(
    ("config", "part"), [("config", "hydra_logging"), ("config", "job_logging"), ("bench", "job_logging")]
)
def test_warnings_reach_the_terminal(config, part, root, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ours = logging.getLogger("pensieve.a_module_imported_before")
    with hydra_session():
        hydra = compose(config_name=config, return_hydra_config=True).hydra
    settings = OmegaConf.to_container(hydra[part], resolve=False)
    if "file" in settings["handlers"]:
        settings["handlers"]["file"]["filename"] = str(tmp_path / "run.log")  # Hydra knows the folder of a run
    dictConfig(settings)
    ours.warning("the kernel does not run here")
    ours.info("nothing to worry about")
    assert "the kernel does not run here" in capsys.readouterr().err
    assert (tmp_path / "run.log").exists() == (config == "config" and part == "job_logging"), "bench has no run folder"
