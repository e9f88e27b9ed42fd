"""Resolve the configuration, check its fields, and bind those of a `_target_` as arguments of the class or function that it
names.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NotRequired, TypeVar, get_type_hints

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import (
    BaseModel,
    ConfigDict,
    PydanticSchemaGenerationError,
    PydanticUndefinedAnnotation,
    TypeAdapter,
    ValidationError,
)
from typing_extensions import TypedDict

from pensieve.errors import ConfigError, EngineMissing, PensieveError
from pensieve.lab.compose.conf import ended, nearest, options
from pensieve.lab.compose.model_files import completed
from pensieve.lab.compose.schema import TrialConfig, own_fields

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
    deep = 0
    for deep, part in enumerate(first["loc"], start=1):
        if not isinstance(value, Mapping):
            deep -= 1
            break  # what follows is a place in a list, or a member of a union
        if part not in value and deep < len(first["loc"]):
            continue  # a part of a group, whose fields are written in the group
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
    place = first["loc"][:deep]
    of_a_union = [e["msg"] for e in errors if e is not first and e["loc"][:deep] == place and len(e["loc"]) > deep]
    said = first["msg"].removeprefix("Value error, ").rstrip(".")
    said = " or ".join([said, *(text.removeprefix("Input should be ") for text in of_a_union)])
    if isinstance(value, Mapping):  # what is wrong is said of fields together, and names them
        return f"{said}." if said.startswith(f"{field}.") else f"{field}: {said}."
    return f"{field}={value!r} cannot be used: {said}."


def _fields_of(model: type[BaseModel], path: Sequence[str]) -> Iterable[str]:
    for part in path:
        annotation = own_fields(model)[part].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return own_fields(model)


NOT_HERE = "this version does not have it: CHANGELOG.md says what moved where"
_NOT_ARGUMENTS = {"_target_", "_partial_", "_convert_", "_recursive_", "name", "missing", "inspect"}


def refuse_missing(group: str, node: Mapping[str, Any]) -> None:
    """Raise EngineMissing for an option whose YAML says that its engine is not there."""
    if node.get("missing"):
        raise EngineMissing(
            f"{group}={node.get('name')} ({node['missing']}) has no engine in this version yet; choose another {group}."
        )


def locate(dotted: str, option: str) -> Any:
    """The object behind a dotted path. Raises EngineMissing where no such module or attribute exists."""
    module_name, _, attribute = dotted.rpartition(".")
    if not module_name:
        raise ConfigError(f"{option} names {dotted!r}; write a dotted path such as my_module.MyClass.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise EngineMissing(_missing(option, dotted)) from error
        if error.name is not None and error.name.startswith("pensieve."):
            raise EngineMissing(f"{option} imports {error.name}, and {NOT_HERE}.") from error
        raise EngineMissing(f"{option} needs the package {error.name}, which is not installed.") from error
    if not hasattr(module, attribute):
        raise EngineMissing(_missing(option, dotted))
    return getattr(module, attribute)


def factory(group: str, node: Mapping[str, Any], given: tuple[str, ...] = ()) -> Callable[..., Any]:
    """The target with the fields of `node` bound; `given` names the keyword arguments that the caller passes itself.

    Raises EngineMissing where the target is not there, ConfigError for a field that it does not take or whose type it
    refuses, each naming the field.
    """
    refuse_missing(group, node)
    option = f"{group}={node.get('name', '?')}"
    if "_target_" not in node:
        raise ConfigError(f"{option} has no _target_; give the dotted path of its class.")
    target = locate(str(node["_target_"]), option)
    fields = {key: _instantiated(value) for key, value in node.items() if key not in _NOT_ARGUMENTS}
    return functools.partial(target, **_bind(group, target, fields, given))


def _bind(group: str, target: Any, fields: Mapping[str, Any], given: tuple[str, ...]) -> dict[str, Any]:
    """The fields, checked against the signature and converted to its types: a float from an int, a tuple from a list.

    Pydantic's validate_call would do so at the call only, which is too late for a preflight. A positional parameter without
    a default (a context, a policy) is the caller's to pass.
    """
    parameters = inspect.signature(target).parameters
    hints = _hints(target)
    accepted: dict[str, Any] = {}
    for name, p in parameters.items():
        optional = p.default is not p.empty
        if name not in given and (p.kind is p.KEYWORD_ONLY or (p.kind is p.POSITIONAL_OR_KEYWORD and optional)):
            hint = _checkable(hints.get(name, Any))
            accepted[name] = NotRequired[hint] if optional else hint
    arguments = TypedDict("arguments", accepted)  # type: ignore[misc]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    arguments.__pydantic_config__ = ConfigDict(extra="allow" if open_ended else "forbid")  # type: ignore[attr-defined]
    try:
        return dict(TypeAdapter(arguments).validate_python(fields))
    except ValidationError as error:
        raise ConfigError(explain_invalid(error, fields, lambda _: accepted, group)) from error


def _instantiated(value: Any) -> Any:
    """A field that describes an object. Only such go through Hydra, which would turn a tuple into a list."""
    return instantiate(value, _convert_="all") if isinstance(value, dict) and "_target_" in value else value


def _hints(target: Any) -> dict[str, Any]:
    try:
        return get_type_hints(target.__init__ if inspect.isclass(target) else target, include_extras=True)
    except (NameError, TypeError):
        return {}  # names imported for type checking only: the field names are checked all the same


def _checkable(hint: Any) -> Any:
    """Any where pydantic cannot check the type, such as a class of the user's."""
    try:
        TypeAdapter(hint)
    except (PydanticSchemaGenerationError, PydanticUndefinedAnnotation):
        return Any
    return hint


def _missing(option: str, dotted: str) -> str:
    hint = NOT_HERE if dotted.startswith("pensieve.") else "it cannot be found from the current folder"
    return f"{option} needs {dotted}, and {hint}; choose another option."
