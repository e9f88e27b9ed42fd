"""Resolve the configuration and check its fields; an unknown or malformed field is explained in one sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from pensieve.errors import ConfigError, PensieveError
from pensieve.lab.compose.folder import ended, nearest, options
from pensieve.lab.compose.schema import TrialConfig
from pensieve.lab.compose.weights import completed

Node = TypeVar("Node", bound=BaseModel)

OmegaConf.register_new_resolver("product", lambda *factors: math.prod(map(int, factors)), replace=True)
"""For overlays: ${product:4,${hardware.replicas}}."""


def _setting_of_run(name: str, otherwise: Any, *, _root_: DictConfig) -> Any:
    """For overlays: ${vllm_run:max_num_seqs,256}, a setting of the run that the workload replays."""
    from pensieve.lab.workload.vllm_run import setting  # which takes a while to import, and few ask

    value = setting(name, _root_.workload.get("run"), _root_.workload.get("path"))
    return otherwise if value is None else f"{value} tokens" if name == "num_kv_tokens" else value


OmegaConf.register_new_resolver("vllm_run", _setting_of_run, replace=True)


def resolved(cfg: DictConfig | Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as plain values, every interpolation resolved, without Hydra's own node, and with what only a model's
    own files say. Raises ConfigError, and what weights.completed and reading.setting raise."""
    if isinstance(cfg, DictConfig):
        try:
            unset = sorted(key for key in OmegaConf.missing_keys(cfg) if not key.startswith("hydra."))
            plain = OmegaConf.to_container(cfg, resolve=True)
        except OmegaConfBaseException as error:
            said: BaseException | None = error
            while isinstance(said, OmegaConfBaseException):
                said = said.__context__
            if isinstance(said, PensieveError):  # of a resolver
                raise said from None
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
    kept = {str(key): value for key, value in plain.items() if key not in ("hydra", "experiment")}
    if isinstance(kept.get("model"), Mapping):
        kept["model"] = completed(kept["model"])
    return kept


def check(cfg: DictConfig | Mapping[str, Any]) -> TrialConfig:
    """The configuration as typed fields. Raises ConfigError with one sentence about the first thing that is wrong."""
    plain = resolved(cfg)
    try:
        config = TrialConfig.model_validate(plain)
    except ValidationError as error:
        raise ConfigError(explain_invalid(error, plain, partial(_fields_of, TrialConfig))) from None
    if config.scheduler.swap_out_stop < config.scheduler.swap_out_start:
        raise ConfigError("scheduler.swap_out_stop must not be below scheduler.swap_out_start.")
    return config


def check_node(model: type[Node], config: Mapping[str, Any], name: str) -> Node:
    """The node of a command, such as `serve`, as typed fields. Raises ConfigError, as check does."""
    try:
        return model.model_validate(config[name])
    except ValidationError as error:
        raise ConfigError(explain_invalid(error, config[name], partial(_fields_of, model), name)) from None


def explain_invalid(
    error: ValidationError,
    given: Mapping[str, Any],
    fields_of: Callable[[Sequence[str]], Iterable[str]],
    *group: str,
) -> str:
    """One sentence about the first thing that is wrong, an unknown field before all others.

    given: what was validated; group: where it is in the configuration. fields_of: the fields that a path may have.
    """
    errors = error.errors()
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    path: list[str] = []
    value: Any = given
    for part in first["loc"]:
        if not isinstance(value, Mapping):
            break  # what follows is a place in a list, or a member of a union
        path.append(str(part))
        value = value.get(str(part))
    field = ".".join([*group, *path])
    if first["type"] == "extra_forbidden":
        known = [".".join([*group, *path[:-1], name]) for name in fields_of(path[:-1])]
        return ended(f"The field {field} is unknown{nearest(field, known)}")
    if first["type"] == "missing":
        return f"The field {field} has no value; set it."
    if first["type"] == "list_type":
        return f"{field} takes a list; write {field}=[{value}]."
    place = first["loc"][: len(path)]
    of_a_union = [
        e["msg"] for e in errors if e is not first and e["loc"][: len(path)] == place and len(e["loc"]) > len(path)
    ]
    said = first["msg"].removeprefix("Value error, ").rstrip(".")
    said = " or ".join([said, *(text.removeprefix("Input should be ") for text in of_a_union)])
    if isinstance(value, Mapping):  # what is wrong is said of fields together, and names them
        return f"{said}." if said.startswith(f"{field}.") else f"{field}: {said}."
    return f"{field}={value!r} cannot be used: {said}."


def _fields_of(model: type[BaseModel], path: Sequence[str]) -> Iterable[str]:
    for part in path:
        annotation = model.model_fields[part].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return model.model_fields
