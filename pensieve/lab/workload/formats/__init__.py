"""Public formats of recorded requests, by name: of a Reader each makes a Recording."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from pensieve.errors import ConfigError
from pensieve.lab.traffic import table
from pensieve.lab.traffic.hashing import Salt
from pensieve.lab.workload.formats import served, text, timed, tracelab, traffic, weka
from pensieve.lab.workload.formats.converted import converted
from pensieve.lab.workload.formats.reading import OnMalformed, Reader
from pensieve.lab.workload.recording import Recording

FORMATS: dict[str, Callable[[Reader], Recording]] = {
    "openai_jsonl": partial(text.read, "openai_jsonl"),
    "sharegpt": partial(text.read, "sharegpt"),
    "lmbenchmark": text.read_lmbenchmark,
    "agent_jsonl": text.read_agents,
    "weka": weka.read,
    "tracelab": tracelab.read,
    "mooncake": timed.mooncake,
    "qwen_bailian": timed.qwen_bailian,
    "ragpulse": timed.ragpulse,
    "azure": timed.azure,
    "burstgpt": timed.burstgpt,
    "mt_bench": partial(text.read, "mt_bench"),
    "mt_bench_101": partial(text.read, "mt_bench_101"),
    "traffic": traffic.read,
    **{name: partial(traffic.read_served, name) for name in served.SERVED},
}
_FIELDS = {
    "openai_jsonl": {"messages"},
    "lmbenchmark": {"input", "output_length"},
    "agent_jsonl": {"session_id", "input", "output"},
    "weka": {"requests", "block_size"},
    "tracelab": tracelab.FIELDS,
    "qwen_bailian": {"chat_id", "parent_chat_id"},
    "ragpulse": {"session_id", "hash_ids"},
    "mooncake": {"input_length", "hash_ids"},
    "azure": set(timed.AZURE),
    "burstgpt": set(timed.BURSTGPT),
    "mt_bench": {"question_id", "turns"},
    "mt_bench_101": {"history"},
    "lmcache_lookup": served.LMCACHE,
    "inference_perf": served.INFERENCE_PERF,
    "aiperf": served.AIPERF,
}
"""What the first entry of a file has, by format, the first match first. ShareGPT's has one of several."""


def load(path: str | Path, format: str | None = None, on_malformed: OnMalformed = "fail") -> Recording:
    """Read recorded requests; format=None: the one that the first entry looks like.

    Raises ConfigError for an unknown format or a path that is not there, MalformedInput for what is in it.
    """
    if format is not None and format not in FORMATS:
        raise ConfigError(f"workload.format={format!r} is unknown; choose one of {', '.join(FORMATS)}.")
    found = Path(path).expanduser()
    if not found.exists():
        raise ConfigError(f"workload.path={path} does not exist; give the file (or folder) of the recorded requests.")
    format = format or _format_of(found)
    recording = FORMATS[format](Reader(found, on_malformed))
    if not recording.conversations:
        raise ConfigError(
            f"workload.path={path} holds no request in the format {format}; is it another workload.format?"
        )
    return recording


def convert(path: Path, format: str | None, out: Path, salt: Salt) -> None:
    """Write requests of any format as recorded traffic. Raises as load does, and OSError."""
    found = path.expanduser()
    named = format or (_format_of(found) if found.exists() else None)
    if found.exists() and named in served.SERVED:
        table.write(out, *served.rows_of(named, Reader(found, "fail"), salt))
    else:
        table.write(out, *converted(load(path, named), salt))


def _format_of(path: Path) -> str:
    if table.is_traffic(path):
        return "traffic"
    if path.suffix == ".pkl" or (path.is_dir() and any(path.glob("*.pkl"))):
        return "sglang_dump"
    fields = Reader(path, "fail").first_fields()
    for name, needed in _FIELDS.items():
        if needed <= fields:
            return name
    if fields & {"conversations", "data"}:
        return "sharegpt"
    near = max(_FIELDS, key=lambda name: len(_FIELDS[name] & fields) / len(_FIELDS[name]))
    lacking = ", ".join(sorted(_FIELDS[near] - fields))
    lacking = f" It is nearest to {near}, and lacks {lacking}." if fields & _FIELDS[near] else ""
    raise ConfigError(
        f"The format of workload.path={path} cannot be told from its first entry; say which it is with "
        f"workload.format={'|'.join(FORMATS)}.{lacking}"
    )
