"""Trials beside each other: their fields by name, which of these vary, why some must not be compared, what served them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pensieve.lab.results.digest import outside_names
from pensieve.lab.results.identity import NOT_CONFIG
from pensieve.lab.results.schema import Trial
from pensieve.lab.results.slo import PREFIX

COLUMNS = frozenset(column.name for column in Trial.__table__.columns)
_OPTIONS = ("model", "cache", "eviction", "scheduler", "workload", "hardware")  # axes that columns hold by name
_OVERLAYS = ("experiment", "replay", "scale")  # axes whose options are laid over the whole configuration
_WITHIN_A_GROUP = ("seed", "repeat", "baseline")
_NOT_MEASURED = ("hydra", "tracking", "trial", "force", "resume", "slo")  # how a trial is run and where it is kept


# Fields and axes


def field_of(trial: Trial, name: str) -> Any:
    """A column of table `trial`, else a dotted field of its configuration or flags; None where there is neither."""
    if name in COLUMNS:
        return getattr(trial, name)
    return _at({**(trial.config or {}), "flags": trial.flags or {}}, name)


def text_of(value: Any) -> str:
    """As a person would write it: true, none, 0.25, 3.12e+14."""
    if isinstance(value, float):
        exact = (text for digits in (6, 12, 17) if float(text := f"{value:.{digits}g}") == value)
        return next(exact, str(value))  # nan equals nothing
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def leaves(node: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted field, value) of a configuration, without Hydra's own; an empty group is a value."""
    for key, value in node.items():
        name = f"{above}{key}"
        if name == "hydra":
            continue
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{name}.")
        else:
            yield name, value


def flat(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(dotted field, value as text) of a configuration, without the fields that only say where a trial is kept."""
    kept = {key: value for key, value in config.items() if key not in _NOT_MEASURED}
    return [(name, text_of(value)) for name, value in leaves(kept) if not isinstance(value, Mapping)]


def differences(trials: Iterable[Trial]) -> set[str]:
    """Dotted fields of the configuration that have more than one value among these trials; seed and repeat aside."""
    found = [dict(flat(trial.config)) for trial in trials]
    names = {name for one in found for name in one} - {"seed", "repeat", "experiment_name"}
    return {name for name in names if len({one.get(name, "") for one in found}) > 1}


def varying_axes(overrides: Mapping[str, Any], trials: Sequence[Trial]) -> list[str]:
    """Of the sweep's overrides, those that took more than one value, in the order given (outermost first); seed, repeat
    and baseline, which never tell groups apart, aside. A swept overlay (experiment, replay) is no field of a trial: the
    options that it chose stand for it."""
    keys = [key.lstrip("+") for key in overrides if not key.lstrip("+").startswith(PREFIX)]
    axes = [key for key in keys if key not in _WITHIN_A_GROUP and key.split(".")[0].split("/")[0] != "hydra"]
    if any("." not in axis and axis in _OVERLAYS for axis in swept_axes(overrides)):
        axes += [option for option in _OPTIONS if option not in axes]
    return [axis for axis in axes if len({axis_value(trial, axis) for trial in trials}) > 1]


def swept_axes(overrides: Mapping[str, Any]) -> list[str]:
    """The overrides that have several values, in the order given (outermost first), before any trial has run."""
    several = [
        key.lstrip("+") for key, value in overrides.items() if len(listed_values(value) or str(value).split(",")) > 1
    ]
    return [key for key in several if key.split(".")[0].split("/")[0] != "hydra"]


def listed_values(value: Any) -> list[str]:
    """The values of an override. An axis is a list; [] where its trials tell: a sweeper chose them, as choice(1,2), or an
    older database has a text with quotes or brackets."""
    if isinstance(value, list):
        return [str(one) for one in value]
    return [] if set(str(value)) & set("'\"[{(") else str(value).split(",")


def axis_value(trial: Trial, axis: str) -> str:
    """What a trial's configuration holds at an override's key: a group's option, or a field."""
    if axis in _OPTIONS:
        return str(getattr(trial, axis))
    value = _at(trial.config, axis.replace("/", "."))
    return str(value.get("name", value)) if isinstance(value, Mapping) else str(value)


def _at(node: Any, name: str) -> Any:
    for part in name.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


# What must not be compared: one rule for figures, claims, comparisons and reports


@dataclass(frozen=True, slots=True)
class Mixture:
    """One reason. what: a noun phrase. remedy: what the reader should do. trials: the ids concerned, empty: all of them."""

    what: str
    remedy: str
    trials: tuple[int, ...] = ()


_SPOILT = (
    ("profiled", "trials that a profiler slowed", "run them again without trial.profile=true"),
    (
        "contaminated",
        "trials whose engine still held what an earlier run had asked",
        "start it anew, or run them with cache_state=salted and another seed",
    ),
)
"""A flag of a trial that no other is to be compared with, what such trials are called, and the remedy."""


def mixtures(trials: Sequence[Trial]) -> list[Mixture]:
    """Why times of these trials must not be compared; empty where they may be."""
    found = []
    if len({trial.simulated for trial in trials}) > 1:
        found.append(Mixture("simulated and real trials", "keep to one kind of hardware"))
    if contended := tuple(sorted(trial.id for trial in trials if trial.contended)):
        what = "trials that shared their device with others"
        found.append(Mixture(what, "run them again with trial.exclusive=true", contended))
    for flag, what, remedy in _SPOILT:
        if ids := tuple(sorted(trial.id for trial in trials if (trial.flags or {}).get(flag))):
            found.append(Mixture(what, remedy, ids))
    if len({trial.weights == "random" for trial in trials if not trial.simulated}) > 1:
        found.append(Mixture("random and trained weights", "give all trials the same model.weights"))
    if any(len(digests) > 1 for digests in _code(trials).values()):
        what = "trials of different versions of the code"
        found.append(Mixture(what, "run the sweep's command again, which redoes the older ones"))
    unlike = sorted({name for names in _forwards(trials).values() if len(names) > 1 for name in names})
    if unlike:
        what = f"trials of one baseline and setting with different forwards ({'; '.join(unlike)})"
        found.append(Mixture(what, "run all of them again with force=true, and hardware.cpu_memory set on a CPU"))
    return found


def _forwards(trials: Sequence[Trial]) -> Mapping[tuple[str, str], set[str]]:
    """What computed the forwards of each baseline and setting, where it was recorded: whether weights are packed without a
    limit of memory depends on what else the machine held."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for trial in trials:
        forward = (trial.engine or {}).get("forward")
        if forward is not None:
            left_out = (*NOT_CONFIG, "seed", "repeat")
            setting = {key: value for key, value in (trial.config or {}).items() if key not in left_out}
            found[trial.baseline, json.dumps(setting, sort_keys=True, default=str)].add(str(forward))
    return found


def _code(trials: Sequence[Trial]) -> Mapping[str, set[str]]:
    """The hashes of each file of code: trials that use different files are of one version where those that both use are
    alike. Older trials have one hash of all, which counts the classes outside the package that they name."""
    found: dict[str, set[str]] = defaultdict(set)
    for trial in trials:
        files = (trial.environment or {}).get("code")
        found["files"].add("each" if files else "all")
        for name, digest in (files or {str(sorted(outside_names(trial.config or {}))): trial.code_hash}).items():
            found[name].add(digest)
    return found


# Which attention and forward served, and how their self-check came out


def footer(trials: Iterable[Trial]) -> list[str]:
    """A sentence for each way in which trials were served, with the largest difference that its self-checks found; several
    ways are told apart by their baselines. Simulated trials and engines of others have none."""
    ways: dict[tuple[str, ...], dict[str, list[Mapping[str, Any]]]] = {}
    for trial in trials:
        settings = trial.engine or {}
        if not trial.simulated and settings.get("self_check_difference") is not None:
            ways.setdefault(_way(settings), {}).setdefault(trial.baseline, []).append(settings)
    return [
        sentence([one for own in way.values() for one in own], f" ({', '.join(way)})" if len(ways) > 1 else "")
        for way in ways.values()
    ]


def _way(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Attention, forward, what the right logits were, and why something better did not serve."""
    notes = [settings.get(name) for name in ("attention_note", "forward_note")] if settings.get("fell_back") else []
    attention = f"{settings['attention_backend']} {settings.get('attention_version') or ''}".strip()
    return attention, settings["forward"], settings["self_check_against"], " ".join(filter(None, notes))


def sentence(settings: Sequence[Mapping[str, Any]], of: str = "") -> str:
    """Say how trials were served alike, and the self-check of the one among them that came nearest to its limit. settings:
    as a torch worker reports them."""
    attention, forward, against, note = _way(settings[0])
    worst = max(settings, key=lambda one: one["self_check_difference"] / one["self_check_limit"])
    right = "the model's own" if against == "eager" else "those of the same weights in float32"
    fell_back = f" Something better did not serve. {note}" if note else ""
    return (
        f"Attention{of}: {attention}; forward: {forward}. Self-check passed: logits differ from {right} by "
        f"{worst['self_check_difference']:.2g}, of {worst['self_check_limit']:.2g} allowed.{fell_back}"
    )
