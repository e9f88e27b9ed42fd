"""The jobs of a sweep before any of them runs: its axes, their order, and each job's configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from hydra import compose
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from pensieve.errors import ConfigError
from pensieve.results.process import Owner

BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
INNERMOST = "baseline"
SWEEP_FILE = "sweep.json"


@dataclass(frozen=True, slots=True)
class Jobs:
    """overrides: what every job shares. axes: what each swept field runs through, outermost first. jobs: one list each."""

    overrides: tuple[str, ...]
    axes: Mapping[str, tuple[str, ...]]
    jobs: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class SweepMembership:
    """What a job knows of its sweep, through a file in the sweep's folder: jobs may run in other processes.

    owner: the process of the sweep, without which its jobs do not go on.
    """

    sweep_id: int
    mlflow_run_id: str | None
    n_expected: int
    outputs: str
    axes: tuple[str, ...] = ()
    owner: Owner | None = None


def plan_jobs(config: DictConfig) -> Jobs | None:
    """Put baseline innermost in the sweeper's own parameters, then list the jobs; None for a sweeper that chooses as it
    goes.

    Raises ConfigError where `experiment` is swept (the axes that an overlay states would be ignored), or a promise is.
    """
    if config.hydra.sweeper.get("_target_") != BASIC_SWEEPER:
        return None
    given = [str(text) for text in config.hydra.overrides.task]
    loader = GlobalHydra.instance().config_loader()
    parser = OverridesParser.create(config_loader=loader)
    params = {str(k): str(v) for k, v in (config.hydra.sweeper.params or {}).items()}
    typed = {o.get_key_element(): o for o in parser.parse_overrides(given)}
    swept = {key: o for key, o in typed.items() if o.is_sweep_override()}
    if "experiment" in swept or "," in params.get("experiment", ""):
        raise ConfigError(
            "experiment cannot be swept: the axes that an overlay states would be ignored; run one after another."
        )
    promised = next((key for key in (*params, *swept) if key.startswith("slo.")), None)
    if promised:
        raise ConfigError(
            f"{promised} cannot be swept: a trial is judged by one promise at a time; run one after another, which only "
            "judges the turns again."
        )
    ordered = _innermost_last(params, swept)
    with read_write(config.hydra.sweeper), open_dict(config.hydra.sweeper):
        config.hydra.sweeper.params = ordered
    overrides = parser.parse_overrides([f"{key}={value}" for key, value in ordered.items()] + given)
    jobs = BasicSweeper.split_arguments(overrides, None)[0]
    final = {o.get_key_element(): o for o in overrides}
    axes = {key: _values(o) for key, o in final.items() if o.is_sweep_override()}
    fixed = tuple(sorted(str(o.input_line) for key, o in final.items() if key not in axes))
    return Jobs(fixed, axes, tuple(tuple(job) for job in jobs))


def _innermost_last(params: Mapping[str, str], swept: Mapping[str, Override]) -> dict[str, str]:
    """Later keys vary faster: swept fields of the command line go before baseline, so that baselines interleave."""
    keys = [*params, *(key for key in swept if key not in params)]
    keys.sort(key=lambda key: key == INNERMOST)
    return {key: str(swept[key].input_line).partition("=")[2] if key in swept else params[key] for key in keys}


def _values(override: Override) -> tuple[str, ...]:
    return tuple(override.sweep_string_iterator())


def compose_job(config_name: str, overrides: Sequence[str]) -> DictConfig:
    """The configuration of one job, as the launcher will compose it."""
    cfg = compose(config_name=config_name, overrides=list(overrides))
    assert isinstance(cfg, DictConfig)
    return cfg


def write_membership(folder: Path, membership: SweepMembership) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SWEEP_FILE).write_text(json.dumps(asdict(membership), default=datetime.isoformat), encoding="utf-8")


def sweep_folder(config: DictConfig) -> Path:
    return Path(str(OmegaConf.select(config, "hydra.sweep.dir"))).absolute()


def current_membership() -> tuple[SweepMembership, int] | None:
    """The sweep that this job belongs to and the job's number; None for a single run."""
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return None
    hydra = HydraConfig.get()
    file = Path(hydra.sweep.dir).absolute() / SWEEP_FILE
    if not file.is_file():
        return None
    fields = json.loads(file.read_text(encoding="utf-8"))
    owner = fields["owner"]
    if owner is not None:
        owner = Owner(owner["host"], owner["pid"], datetime.fromisoformat(owner["process_started_at"]))
    return SweepMembership(**{**fields, "axes": tuple(fields["axes"]), "owner": owner}), int(hydra.job.num)
