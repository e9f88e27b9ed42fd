"""Hydra's configurations, each composed once in a process.

A sweep of n trials asks for each of its jobs three times: our checks before it begins, the sweeper, and the launcher. Hydra
composes from the files every time, which takes longer than many a simulated trial.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Mapping
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig

_SEED = re.compile(r"seed=\d+")


class Compositions(ConfigLoaderImpl):
    """Hydra's loader, which keeps what it composed for those who ask for the same again; each gets a copy of its own.

    What the overrides, the folder or the environment make another configuration is composed anew. Configurations that
    differ only in the seed are composed once: it is a plain field, on which no choice of an option depends. Files of conf/
    that change meanwhile are not looked at again: with the launcher that runs jobs one after another in this process, the
    jobs of a sweep are those that were checked before it began. Processes of joblib, submitit and ray do not have what is
    kept here; they compose the jobs they run, from the files as they are then.
    """

    def __init__(self, loader: ConfigLoaderImpl) -> None:
        super().__init__(loader.config_search_path)
        self._kept: dict[Any, bytes] = {}  # pickled: a tenth of the memory, and read back faster than copied

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it as Hydra's own loader: the processes of a launcher compose what they run."""
        return _plain, ({name: value for name, value in self.__dict__.items() if name != "_kept"},)

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        places = [place for place, text in enumerate(overrides) if _SEED.fullmatch(text)]
        shared = len(places) == 1 and sum(text.lstrip("+~").startswith("seed") for text in overrides) == 1
        texts = [
            _SEED.sub("seed=", text) if shared and place in places else text for place, text in enumerate(overrides)
        ]
        asked = (config_name, *texts), run_mode, from_shell, validate_sweep_overrides
        key = (*asked, os.getcwd(), frozenset(os.environ.items()))
        if key not in self._kept:
            composed = super().load_configuration(
                config_name, overrides, run_mode, from_shell, validate_sweep_overrides
            )
            self._kept[key] = pickle.dumps(composed, protocol=pickle.HIGHEST_PROTOCOL)
        found = pickle.loads(self._kept[key])
        assert isinstance(found, DictConfig)
        if shared:
            _set_seed(found, overrides)
        return found


def _plain(state: Mapping[str, Any]) -> ConfigLoaderImpl:
    """Make Hydra's loader without its constructor, which asks for plugins: a process that unpickles it loads them later."""
    loader = ConfigLoaderImpl.__new__(ConfigLoaderImpl)
    loader.__dict__.update(state)
    return loader


def _set_seed(config: DictConfig, overrides: list[str]) -> None:
    """Everything in a configuration that depends on the override of the seed: the field, the list of overrides, and the
    folder's name that Hydra makes of them."""
    job = config.hydra.job
    parsed = OverridesParser.create().parse_overrides(overrides)
    ours = [override for override in parsed if not override.is_hydra_override()]
    for place, override in enumerate(ours):
        if override.key_or_group == "seed":
            config.seed = override.value()
            config.hydra.overrides.task[place] = override.input_line
    names = job.config.override_dirname
    job.override_dirname = get_overrides_dirname(
        overrides=ours, kv_sep=names.kv_sep, item_sep=names.item_sep, exclude_keys=names.exclude_keys
    )


def compose_once() -> None:
    """Have Hydra's configurations composed once in this process, from now on."""
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None, "Hydra is not initialised"
    loader = hydra.config_loader
    if type(loader) is ConfigLoaderImpl:  # neither ours already nor somebody's own
        hydra.config_loader = Compositions(loader)
