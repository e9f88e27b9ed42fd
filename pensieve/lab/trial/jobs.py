"""The jobs of a sweep: its axes, their order, and the configuration of each, composed once in a process.

A sweep of n trials asks for each of its jobs three times: our checks before it begins, the sweeper, and the launcher. Hydra
composes from the files every time, which takes longer than many a simulated trial.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra import compose
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict, read_write

from pensieve.errors import ConfigError
from pensieve.lab.results.identity import numbers_by_value

BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
INNERMOST = "baseline"
_SEED = re.compile(r"seed=\d+")


@dataclass(frozen=True, slots=True)
class Jobs:
    """overrides: shared by all jobs. axes: the values of each swept field, outermost first. jobs: each one's overrides."""

    overrides: tuple[str, ...]
    axes: Mapping[str, tuple[str, ...]]
    jobs: tuple[tuple[str, ...], ...]


def plan_jobs(config: DictConfig) -> Jobs | None:
    """Make baseline the innermost axis in the sweeper's own parameters, then list the jobs.

    None for a sweeper that chooses its jobs as it goes. Raises ConfigError where `experiment` is swept (the axes that an
    overlay states would be ignored), or a field of slo.
    """
    if config.hydra.sweeper.get("_target_") != BASIC_SWEEPER:
        return None
    given = [str(text) for text in config.hydra.overrides.task]
    loader = GlobalHydra.instance().config_loader()
    parser = OverridesParser.create(config_loader=loader)
    params = {str(k): str(v) for k, v in (config.hydra.sweeper.params or {}).items()}
    given = [_without_repeats(o) for o in parser.parse_overrides(given)]
    with read_write(config.hydra.overrides), open_dict(config.hydra.overrides):
        config.hydra.overrides.task = given
    typed = {o.get_key_element(): o for o in parser.parse_overrides(given)}
    swept = {key: o for key, o in typed.items() if o.is_sweep_override()}
    if "experiment" in swept or "," in params.get("experiment", ""):
        raise ConfigError(
            "experiment cannot be swept: the axes that an overlay states would be ignored; run one after another."
        )
    objective = next((key for key in (*params, *swept) if key.startswith("slo.")), None)
    if objective:
        raise ConfigError(
            f"{objective} cannot be swept: a trial is judged by one objective at a time; run one after another, which only "
            "judges the turns again."
        )
    ordered = _innermost_last(params, swept)
    with read_write(config.hydra.sweeper), open_dict(config.hydra.sweeper):
        config.hydra.sweeper.params = ordered
    overrides = parser.parse_overrides([f"{key}={value}" for key, value in ordered.items()] + given)
    jobs = BasicSweeper.split_arguments(overrides, None)[0]
    final = {o.get_key_element(): o for o in overrides}
    axes = {key: tuple(o.sweep_string_iterator()) for key, o in final.items() if o.is_sweep_override()}
    fixed = tuple(sorted(str(o.input_line) for key, o in final.items() if key not in axes))
    return Jobs(fixed, axes, tuple(tuple(job) for job in jobs))


def _without_repeats(override: Override) -> str:
    """As typed, but with each value of a sweep once: `seed=0,0` is one trial, and not two that are counted as two, and so is
    `workload.pressure=2,2.0`."""
    if not override.is_discrete_sweep():
        return str(override.input_line)
    values = list(override.sweep_string_iterator())
    once: dict[str, str] = {}
    for value in values:
        once.setdefault(numbers_by_value(value), value)
    if len(once) == len(values):
        return str(override.input_line)
    return f"{override.get_key_element()}={','.join(once.values())}"


def _innermost_last(params: Mapping[str, str], swept: Mapping[str, Override]) -> dict[str, str]:
    """The sweeper's parameters in the order in which they vary, baseline last (fastest), so that baselines interleave."""
    keys = [*params, *(key for key in swept if key not in params)]
    keys.sort(key=lambda key: key == INNERMOST)
    return {key: str(swept[key].input_line).partition("=")[2] if key in swept else params[key] for key in keys}


def compose_job(config_name: str, overrides: Sequence[str]) -> DictConfig:
    """A configuration outside of a sweep."""
    cfg = compose(config_name=config_name, overrides=list(overrides))
    assert isinstance(cfg, DictConfig)
    return cfg


def compose_jobs(config: DictConfig, jobs: Jobs | None) -> Iterator[DictConfig]:
    """The configuration of each job as the launcher will compose it, without Hydra's own part, composed when it is asked for;
    of the first alone where a sweeper chooses them as it goes. config: that of the sweep."""
    loader = GlobalHydra.instance().config_loader()
    for overrides in jobs.jobs if jobs is not None else [fixed_overrides(config)]:
        cfg = loader.load_sweep_config(config, list(overrides))
        with open_dict(cfg):
            del cfg["hydra"]
        yield cfg


def fixed_overrides(config: DictConfig) -> list[str]:
    """What was typed, where no field of it is swept by us."""
    return [str(text) for text in config.hydra.overrides.task]


# -- composed once ------------------------------------------------------------------------------------------------------


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
