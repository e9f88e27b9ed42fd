"""The resolved configuration, checked: every unknown or malformed field is one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from pensieve.compose.folder import ended, nearest, options
from pensieve.compose.schema import TrialConfig
from pensieve.errors import ConfigError


def resolved(cfg: DictConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Plain values with every interpolation resolved, without Hydra's own node."""
    if isinstance(cfg, DictConfig):
        try:
            unset = sorted(key for key in OmegaConf.missing_keys(cfg) if not key.startswith("hydra."))
            plain = OmegaConf.to_container(cfg, resolve=True)
        except OmegaConfBaseException as error:
            raise ConfigError(f"The configuration cannot be resolved: {str(error).splitlines()[0]}.") from error
        if unset:
            group = unset[0].partition(".")[0]
            raise ConfigError(
                f"{unset[0]} has no value: {group}=base only holds what the others share; choose one of: "
                f"{', '.join(options(group))}."
            )
        assert isinstance(plain, dict)
    else:
        plain = dict(cfg)
    return {str(key): value for key, value in plain.items() if key not in ("hydra", "experiment")}


def check(cfg: DictConfig | Mapping[str, Any]) -> TrialConfig:
    """The configuration with its types. Raises ConfigError with one sentence about the first thing that is wrong."""
    try:
        config = TrialConfig.model_validate(resolved(cfg))
    except ValidationError as error:
        raise ConfigError(_sentence(error)) from None
    if config.scheduler.swap_out_stop < config.scheduler.swap_out_start:
        raise ConfigError("scheduler.swap_out_stop must not be below scheduler.swap_out_start.")
    if config.trial.profile and config.hardware.simulated:
        raise ConfigError(
            f"trial.profile=true traces what torch does, and hardware={config.hardware.name} is simulated without torch; "
            "use hardware=local."
        )
    return config


def _sentence(error: ValidationError) -> str:
    first = next((e for e in error.errors() if e["type"] == "extra_forbidden"), error.errors()[0])
    path = [str(part) for part in first["loc"]]
    field = ".".join(path)
    if first["type"] == "extra_forbidden":
        known = [".".join([*path[:-1], name]) for name in _siblings(path[:-1])]
        return ended(f"The field {field} is unknown{nearest(field, known)}")
    if first["type"] == "missing":
        return f"The field {field} has no value; set it."
    return f"{field}={first['input']!r} cannot be used: {first['msg']}."


def _siblings(path: Sequence[str]) -> list[str]:
    group: type[BaseModel] = TrialConfig
    for part in path:
        annotation = group.model_fields[part].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        group = annotation
    return list(group.model_fields)
