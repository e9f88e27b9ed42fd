"""Public formats of recorded requests, one file each: `read(reader)` gives a Recording."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pensieve.errors import ConfigError
from pensieve.workload.formats import (
    agent_jsonl,
    azure,
    burstgpt,
    lmbenchmark,
    mooncake,
    mt_bench,
    mt_bench_101,
    qwen_bailian,
    ragpulse,
    sharegpt,
    weka,
)
from pensieve.workload.formats.reading import OnMalformed, Reader
from pensieve.workload.recording import Recording

FORMATS: dict[str, Callable[[Reader], Recording]] = {
    "agent_jsonl": agent_jsonl.read,
    "azure": azure.read,
    "burstgpt": burstgpt.read,
    "lmbenchmark": lmbenchmark.read,
    "mooncake": mooncake.read,
    "mt_bench": mt_bench.read,
    "mt_bench_101": mt_bench_101.read,
    "qwen_bailian": qwen_bailian.read,
    "ragpulse": ragpulse.read,
    "sharegpt": sharegpt.read,
    "weka": weka.read,
}


def load(path: str | Path, format: str, on_malformed: OnMalformed = "fail") -> Recording:
    """Read recorded requests. Raises ConfigError for an unknown format or a path that is not there, MalformedInput for
    what is in it.
    """
    if format not in FORMATS:
        raise ConfigError(f"workload.format={format!r} is unknown; choose one of {', '.join(FORMATS)}.")
    found = Path(path).expanduser()
    if not found.exists():
        raise ConfigError(f"workload.path={path} does not exist; give the file (or folder) of the recorded requests.")
    recording = FORMATS[format](Reader(found, on_malformed))
    if not recording.conversations:
        raise ConfigError(
            f"workload.path={path} holds no request in the format {format}; is it another workload.format?"
        )
    return recording
