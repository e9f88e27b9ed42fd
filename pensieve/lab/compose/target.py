"""Find the class or function that a group names by _target_, and bind the group's fields as its arguments."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NotRequired, get_type_hints

from hydra.utils import instantiate
from pydantic import (
    ConfigDict,
    PydanticSchemaGenerationError,
    PydanticUndefinedAnnotation,
    TypeAdapter,
    ValidationError,
)
from typing_extensions import TypedDict

from pensieve.errors import ConfigError, EngineMissing
from pensieve.lab.compose.settings import explain_invalid

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
