"""The identity of a trial: digests of its configuration, its code and its platform, and a sentence on what differs.

A trial that completed is reused while all of this is equal, and runs again when any of it changed:

| part     | counts                                                  | does not count                                        |
|----------|---------------------------------------------------------|-------------------------------------------------------|
| config   | every field of the resolved configuration but those on  | NOT_CONFIG: how a trial is run, named and kept, and   |
|          | the right; seed and repeat too                          | slo.*, by which a view judges the turns (results.slo);|
|          |                                                         | TEXT_FIELDS: hardware.source                          |
| config   | trial.profile=true and, on a real device,               | every other trial.*: isolate, retries, timeout_s,     |
|          | trial.exclusive=false; what a reproduction repeats      | fail_fast; trial.exclusive in a simulation            |
| config   | real: the commit of weights from the hub, where it is   | simulated: the weights, which are not loaded          |
|          | known; the content of a GGUF file                       |                                                       |
| config   | a field that names a file or folder here (INPUT_FIELDS, | where that file or folder lies                        |
|          | *_path: traces, weights, tokenizers, profiles): all its |                                                       |
|          | bytes (results.digest)                                  |                                                       |
| config   | numbers by their value: 3 and 3.0 are one               | how a number is written                               |
| code     | of the package and the user's own modules: what the     | the rest of the package; comments, docstrings,        |
|          | module that runs the trial, and each that `_target_` or | layout; digest.NOT_CODE (what records and shows a     |
|          | scheduler.composition names, can import (digest)        | trial); the version of Python; installed packages:    |
|          |                                                         | the platform names those that matter                  |
| platform | real: device and count, dtype, attention backend and    | simulated: anything; the platform is "sim"            |
|          | its compiler, graphs, copy_ahead, depth,                |                                                       |
|          | threads, OMP_WAIT_POLICY (on a CPU), versions of torch, |                                                       |
|          | transformers, triton and any outside engine; what a     |                                                       |
|          | server that somebody else started says of itself        |                                                       |

What `auto` means is in the platform as it resolves before anything is loaded (trial.identity): with the C compiler gone,
attention_backend=auto is another backend and the trial another trial. One thing only a start can tell: whether the kernel
passes its self-check, else the next backend serves. What came out is in the trial's `engine` (attention_backend,
attention_note, graphs, copies, copy_ahead). It needs no comparison
when a trial is reused: all that decides it, save the noise of a measurement, is in the platform and the code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pensieve.lab.results.digest import RUNS_TRIALS, code_of, content_hash, hash_of, text_hash

if TYPE_CHECKING:  # the schema needs SQLAlchemy, and a mistake in a configuration is told before that is imported
    from pensieve.lab.results.schema import Trial

NOT_CONFIG = ("tracking", "hydra", "force", "resume", "trial", "experiment", "experiment_name", "sweep", "slo")
"""Top-level fields that say how a trial is run, named, kept and judged, not what it measures."""

TEXT_FIELDS = ("hardware.source",)
"""Fields that inform the reader and change no measurement."""

NOT_SWEEP = ("force", "resume", "hydra", "trial", "tracking")
"""Overrides that leave the sweep the same: they say how its jobs are run and recorded, not which. force=true begins another
one of the same jobs, or goes on with one that it began and that did not complete (ResultsStore.open_sweep), so that an older
one goes on showing its trials."""

INPUT_FIELDS = ("path", "weights", "profile", "file", "gguf_file", "tokenizer")
"""Last parts of the names of fields that hold paths: where the path exists, its content is hashed instead."""

UNSTATED = "unstated"
"""Of a device's facts: a sentence on what of an engine could not be told. See Identity."""

_NUMBER = re.compile(r"(?<![\w.+-])[-+]?\d+(?:\.\d*(?:[eE][-+]?\d+)?|[eE][-+]?\d+)(?![\w.])")
"""With a point or an exponent; whole numbers are written in one way as they are."""

NOT_PATHS = ("", "hub", "random", "gguf", "bytes")
"""A folder that happens to be called random is not what weights=random means."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A completed trial is reused for a new one of the same identity.

    unstated: why the platform does not say all that ran, in a sentence; such a trial is not reused. code: the files behind
    code_hash, with a short hash of each.
    """

    config_hash: str
    code_hash: str
    platform: str
    unstated: str | None = None
    code: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.config_hash, self.code_hash, self.platform)


def identify(
    config: Mapping[str, Any],
    simulated: bool,
    device: Mapping[str, Any],
    marks: Mapping[str, Any] | None = None,
    entry: str = RUNS_TRIALS,
) -> Identity:
    """Compute the identity. config: resolved. device: see platform_of. marks: further fields that are hashed with it. entry:
    the module that runs the trial."""
    counted = config_hash({**config, **(marks or {})})
    platform, unstated = platform_of(simulated, device), device.get(UNSTATED)
    code = code_of(config, entry)
    files = {name: digest[:12] for name, digest in code.items()}
    return Identity(counted, hash_of(code), platform, unstated, files)


def fingerprint(config_hash: str, code_hash: str, platform: str) -> str:
    return text_hash(json.dumps([config_hash, code_hash, platform]))


def config_hash(config: Mapping[str, Any]) -> str:
    """As plain_hash, without NOT_CONFIG, and with numbers by their value."""
    return plain_hash(_by_value(_counted(config)))


def plain_hash(config: Mapping[str, Any]) -> str:
    """SHA-256 of plain values, input paths replaced by a hash of their content."""
    return text_hash(json.dumps(_with_contents(config), sort_keys=True, default=str))


def input_files(config: Mapping[str, Any]) -> dict[str, str]:
    """The hash of the content of every field that names a file or folder on this disk (INPUT_FIELDS), by dotted name."""
    found: dict[str, str] = {}
    _with_contents(_counted(config), found=found)
    return found


def _counted(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if key not in NOT_CONFIG}
    for group, _, name in (dotted.partition(".") for dotted in TEXT_FIELDS):
        if isinstance(kept.get(group), Mapping):
            kept[group] = {key: value for key, value in kept[group].items() if key != name}
    return kept


def platform_of(simulated: bool, device: Mapping[str, Any]) -> str:
    """ "sim", or the device and what a real measurement depends on, in a line of `key=value; ...`.

    device: name, count, whatever else is known of how it will be used (see trial.identity), and, for an outside engine,
    `packages`: the distributions that it consists of.
    """
    if simulated:
        return "sim"
    used = {key: value for key, value in device.items() if key not in ("name", "count", "packages", UNSTATED)}
    facts: dict[str, Any] = {"device": device.get("name"), "count": device.get("count", 1), **used}
    for package in ("torch", "transformers", "triton", *sorted(device.get("packages", ()))):
        facts[package] = _version(package)
    return "; ".join(f"{key}={value}" for key, value in facts.items() if value is not None)


def sweep_key(overrides: Iterable[str], axes: Mapping[str, object], jobs: Iterable[Mapping[str, Any]] = ()) -> str:
    """The hash by which a sweep is found again. overrides: `key=value` as typed, in any order. axes: the values of each
    swept field, outermost first.

    jobs: the resolved configuration of each, in order. What was typed does not say all: an overlay that was edited, or a
    trace that was replaced, makes other jobs and so another sweep under the same command.
    """
    typed = [text.lstrip("+") for text in overrides]
    kept = sorted(numbers_by_value(text) for text in typed if counts_for_sweep(text))
    named = [(key, numbers_by_value(str(value))) for key, value in axes.items()]
    return text_hash(json.dumps([kept, named, [config_hash(job) for job in jobs]]))


def numbers_by_value(text: str) -> str:
    """A text in which each number that stands alone is written in one way."""
    return _NUMBER.sub(lambda found: json.dumps(_by_value(float(found[0]))), text)


def _by_value(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _by_value(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_by_value(inner) for inner in value]
    return value


def counts_for_sweep(override: str) -> bool:
    """Whether an override (`key=value`, or its key) makes another sweep."""
    key = override.partition("=")[0].lstrip("+~")
    return key.split("/")[0].split(".")[0] not in NOT_SWEEP


def explain_difference(old: Trial, new: Identity) -> str:
    """One line on why a completed trial of the same configuration is not reused for the new one."""
    if new.unstated is not None:
        return f"Runs again: {new.unstated} (resume=config accepts trial {old.id})."
    changes = []
    if old.config_hash != new.config_hash:
        changes.append("the configuration")
    if old.code_hash != new.code_hash:
        changes.append("the code")
    if old.platform != new.platform:
        changes.append(_platform_change(old.platform, new.platform))
    if not changes:
        return f"Trial {old.id} is the same trial: nothing changed."
    return f"Runs again, because {' and '.join(changes)} changed since trial {old.id} (resume=config accepts that one)."


def _with_contents(value: Any, name: str = "", found: dict[str, str] | None = None) -> Any:
    """The value with the hash of its content for each path of an input. name: dotted. found: is told these hashes."""
    if isinstance(value, Mapping):
        return {
            str(key): _with_contents(one, f"{name}.{key}" if name else str(key), found) for key, one in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_with_contents(one, f"{name}[{index}]", found) for index, one in enumerate(value)]
    last = name.rpartition(".")[2].partition("[")[0]
    if not isinstance(value, str) or value in NOT_PATHS or not (last in INPUT_FIELDS or last.endswith("_path")):
        return value
    path = Path(value).expanduser()
    if not path.exists():
        return value
    digest = f"sha256:{content_hash(path)}"
    if found is not None:
        found[name] = digest
    return digest


def _platform_change(old: str, new: str) -> str:
    before, after = (dict(part.partition("=")[::2] for part in text.split("; ")) for text in (old, new))
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    changes = [
        f"{key} {before.get(key) or '(not there)'} -> {after.get(key) or '(not there)'}" for key in keys if key != "sim"
    ]
    return f"the platform ({', '.join(changes)})" if changes else "the platform"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
