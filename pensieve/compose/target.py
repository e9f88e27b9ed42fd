"""Groups that name a class or a function by its dotted path: find it, check the fields against it, make the factory."""

from __future__ import annotations

import functools
import importlib
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import PydanticSchemaGenerationError, PydanticUndefinedAnnotation, TypeAdapter, ValidationError

from pensieve.compose.folder import ended, nearest
from pensieve.errors import ConfigError, EngineMissing

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
        raise EngineMissing(f"{option} needs the package {error.name}, which is not installed.") from error
    if not hasattr(module, attribute):
        raise EngineMissing(_missing(option, dotted))
    return getattr(module, attribute)


def factory(group: str, node: Mapping[str, Any], given: tuple[str, ...] = ()) -> Callable[..., Any]:
    """A factory with the fields of `node` bound; `given` names the keyword arguments that the caller passes itself.

    Raises EngineMissing where the target is not there, ConfigError for a field that it does not take or whose type it
    refuses, each naming the field.
    """
    refuse_missing(group, node)
    option = f"{group}={node.get('name', '?')}"
    if "_target_" not in node:
        raise ConfigError(f"{option} has no _target_; give the dotted path of its class.")
    target = locate(str(node["_target_"]), option)
    fields = {key: value for key, value in node.items() if key not in _NOT_ARGUMENTS}
    checked = _checked(group, target, fields, given)
    return functools.partial(target, **{key: _made(value) for key, value in checked.items()})


def _made(value: Any) -> Any:
    """A field that is an object itself. Only those go through Hydra, which would turn tuples into lists."""
    from hydra.utils import instantiate

    return instantiate(value, _convert_="all") if isinstance(value, dict) and "_target_" in value else value


def _checked(group: str, target: Any, fields: Mapping[str, Any], given: tuple[str, ...]) -> dict[str, Any]:
    """The fields, converted. Required positional parameters (a context, a policy) are what the caller passes."""
    parameters = inspect.signature(target).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    accepted = [
        name
        for name, p in parameters.items()
        if name not in given
        and (p.kind is p.KEYWORD_ONLY or (p.kind is p.POSITIONAL_OR_KEYWORD and p.default is not p.empty))
    ]
    hints = _hints(target)
    checked: dict[str, Any] = {}
    for key, value in fields.items():
        if key not in accepted and not open_ended:
            known = [f"{group}.{name}" for name in accepted]
            raise ConfigError(ended(f"The field {group}.{key} is unknown{nearest(f'{group}.{key}', known)}"))
        checked[key] = _converted(f"{group}.{key}", value, hints.get(key))
    lacking = [n for n in accepted if parameters[n].default is inspect.Parameter.empty and n not in fields]
    if lacking:
        raise ConfigError(f"The field {group}.{lacking[0]} has no value; set it.")
    return checked


def _hints(target: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except (NameError, TypeError):
        return {}  # names imported for type checking only: the signature still guards the field names


def _converted(field: str, value: Any, hint: Any) -> Any:
    """The value as the annotation wants it (an int where a float is asked for, a tuple from a list)."""
    if hint is None or isinstance(value, dict):
        return value
    try:
        adapter = TypeAdapter(hint)
    except (PydanticSchemaGenerationError, PydanticUndefinedAnnotation):
        return value
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"{field}={value!r} cannot be used: {error.errors()[0]['msg']}.") from error


def _missing(option: str, dotted: str) -> str:
    own = dotted.startswith("pensieve.")
    hint = "this version does not have it yet" if own else "it cannot be found from the current folder"
    return f"{option} needs {dotted}, and {hint}; choose another option."
