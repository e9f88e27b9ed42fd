"""A job of a sweep that does not find the sweep's folder is refused where a launcher sent it."""

from types import SimpleNamespace

import pytest
from hydra.types import RunMode

from pensieve.errors import ConfigError
from pensieve.lab.trial.sweep import BASIC_LAUNCHER, _refuse_strange_folder


def hydra_of(mode, launcher):
    return SimpleNamespace(mode=mode, launcher={"_target_": launcher}, sweep=SimpleNamespace(dir="/nowhere/sweep"))


def test_only_a_job_that_was_sent_elsewhere_is_refused():
    _refuse_strange_folder(hydra_of(RunMode.RUN, "ray"))
    _refuse_strange_folder(hydra_of(RunMode.MULTIRUN, BASIC_LAUNCHER))
    with pytest.raises(ConfigError, match=r"/nowhere/sweep/sweep.json .* PENSIEVE_OUTPUTS"):
        _refuse_strange_folder(hydra_of(RunMode.MULTIRUN, "ray"))
