"""Public formats of recorded requests, by name: of a Reader each makes a Recording."""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

from pensieve.errors import ConfigError
from pensieve.lab.traffic import table
from pensieve.lab.traffic.table import Salt
from pensieve.lab.workload.formats import coding_agents, served, text, timed, traffic
from pensieve.lab.workload.formats.reading import OnMalformed, Reader
from pensieve.lab.workload.recording import Recording

_KNOWN: dict[str, tuple[Callable[[Reader], Recording], Collection[str]]] = {
    "openai_jsonl": (text.messages, {"messages"}),
    "agent_jsonl": (text.agents, text.AgentCall.needs()),
    "weka": (coding_agents.weka, coding_agents.Weka.needs()),
    "tracelab": (coding_agents.tracelab, coding_agents.TraceLab.needs()),
    "qwen_bailian": (timed.qwen_bailian, timed.Qwen.needs()),
    "ragpulse": (timed.ragpulse, timed.RAGPulse.needs()),
    "mooncake": (timed.mooncake, timed.Mooncake.needs()),
    "azure": (timed.azure, timed.Azure.needs()),
    "mt_bench_101": (text.mt_bench_101, text.MTBench101.needs()),
    **{name: (partial(traffic.read_served, name), fields) for name, (_, fields) in served.SERVED.items()},
    "sharegpt": (text.messages, ()),
    "traffic": (traffic.read, ()),
}
"""How each is read, and what the first entry of its files has, where that tells it; the first match counts."""
FORMATS = tuple(_KNOWN)


def load(path: str | Path, format: str | None = None, on_malformed: OnMalformed = "fail") -> Recording:
    """Read recorded requests; format=None: the one that the first entry looks like.

    Raises ConfigError for an unknown format or a path that is not there, MalformedInput for what is in it.
    """
    name, found = _opened(path, format)
    reader = Reader(found, on_malformed)
    recording = _KNOWN[name][0](reader)
    if not recording.conversations:
        raise ConfigError(f"workload.path={path} holds no request in the format {name}; is it another workload.format?")
    return replace(recording, format=name, malformed=reader.malformed, examples=tuple(reader.examples))


def rows_of(
    path: Path, format: str | None, salt: Salt, on_malformed: OnMalformed = "fail"
) -> tuple[table.Facts, list[table.Exchange]]:
    """Requests of any format but `traffic` as recorded traffic, in order of arrival, or of the file where it has no times.
    Raises as load does."""
    name, found = _opened(path, format)
    if name in served.SERVED:
        return served.in_order(*served.SERVED[name][0](Reader(found, on_malformed), salt))
    return traffic.converted(load(path, format, on_malformed), salt)


def _opened(path: str | Path, format: str | None) -> tuple[str, Path]:
    if format is not None and format not in FORMATS:
        raise ConfigError(f"workload.format={format!r} is unknown; choose one of {', '.join(FORMATS)}.")
    found = Path(path).expanduser()
    if not found.exists():
        raise ConfigError(f"workload.path={path} does not exist; give the file (or folder) of the recorded requests.")
    return format or _format_of(found), found


def _format_of(path: Path) -> str:
    if table.is_traffic(path):
        return "traffic"
    if path.suffix == ".pkl" or (path.is_dir() and any(path.glob("*.pkl"))):
        return "sglang_dump"
    if path.is_dir() and any(path.glob("*.log")):
        return "vllm_events"
    fields = Reader(path, "fail").first_fields()
    for name, (_, needed) in _KNOWN.items():
        if needed and fields.issuperset(needed):
            return name
    if fields & {"conversations", "data"}:
        return "sharegpt"
    told = {name: set(needed) for name, (_, needed) in _KNOWN.items() if needed}
    near = max(told, key=lambda name: len(told[name] & fields) / len(told[name]))
    lacking = ", ".join(sorted(told[near] - fields))
    lacking = f" It is nearest to {near}, and lacks {lacking}." if fields & told[near] else ""
    raise ConfigError(
        f"The format of workload.path={path} cannot be told from its first entry; say which it is with "
        f"workload.format={'|'.join(FORMATS)}.{lacking}"
    )
