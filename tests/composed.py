"""Configurations for tests: composed by Hydra from conf/, simulated and small unless a test says otherwise."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from pensieve.lab.compose.build import build_system, build_workload
from pensieve.lab.compose.conf import conf_folder
from pensieve.lab.compose.model_files import build_tokenizer
from pensieve.lab.compose.plan import plan_trial
from pensieve.lab.compose.settings import TrialConfig, check
from pensieve.lab.replay import ReplayRecord, replay
from pensieve.serve.systems.base import System

SMALL = ("hardware=sim_h100", "tracking=off")
SHORT = ("workload.pressure=0", "workload.min_turns=2", "workload.max_turns=2")
"""Eight conversations of two turns: a trial of them is simulated in a fraction of a second."""


@contextmanager
def hydra_session() -> Iterator[None]:
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(conf_folder()), version_base="1.3"):
        yield


def composed(*overrides: str) -> DictConfig:
    found = pickle.loads(_composed(overrides))  # a test may change its own
    assert isinstance(found, DictConfig)
    return found


@cache
def _composed(overrides: tuple[str, ...]) -> bytes:
    with hydra_session():
        return pickle.dumps(compose(config_name="config", overrides=[*SMALL, *overrides]))


def checked(*overrides: str) -> TrialConfig:
    return check(composed(*overrides))


def replayed(*overrides: str) -> tuple[ReplayRecord, System]:
    """What ran: the composed workload on the composed engine, simulated; the system is closed."""
    plan = plan_trial(checked(*overrides))
    assert plan.device.simulated
    tokenizer = build_tokenizer(plan.config.model, plan.model.vocab, simulated=True)
    workload, described = build_workload(plan, tokenizer)
    system = build_system(plan, tokenizer, described)
    system.start()
    try:
        return replay(system, workload), system
    finally:
        system.close()
