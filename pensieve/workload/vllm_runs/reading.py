"""Real runs of vLLM: when each request came, how long it was, and when its first and last token were there."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from pensieve.errors import ConfigError, MalformedInput

COLUMNS = ("arrival_s", "input_tokens", "output_tokens", "first_token_s", "last_token_s")
SHARED = ("request", "earlier", "tokens")


@dataclass(frozen=True, slots=True)
class RealRequest:
    """Seconds since the first request arrived. beginning: another request, by its place in the order of arrival, whose prompt
    begins with the same `shared_tokens` tokens."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    first_token_s: float
    last_token_s: float
    beginning: int | None = None
    shared_tokens: int = 0

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.first_token_s - self.arrival_s)

    @property
    def tpot_ms(self) -> float | None:
        """None for a reply of one token."""
        if self.output_tokens < 2:
            return None
        return 1e3 * (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def latency_ms(self) -> float:
        return 1e3 * (self.last_token_s - self.arrival_s)


def shipped() -> list[str]:
    """The runs that come with the package."""
    names = (each.name for each in files(__package__).iterdir())
    return sorted(name.removesuffix(".csv") for name in names if name.endswith(".csv") and ".shared." not in name)


def shipped_run(name: str) -> list[RealRequest]:
    """By arrival. Raises ConfigError for one that there is not."""
    if name not in shipped():
        raise ConfigError(f"There is no run {name!r} of vLLM; there are {', '.join(shipped())}.")
    lines = (files(__package__) / f"{name}.csv").read_text(encoding="utf-8").splitlines()
    rows = [[float(row[column]) for column in COLUMNS] for row in csv.DictReader(lines)]
    workload = "sharegpt-qwen3-32b-300-sps10" if "qwen3" in name else "sharegpt-llama-3.1-8b-300-sps10"
    return _requests(rows, workload)


def read_run(path: Path) -> list[RealRequest]:
    """A requests.jsonl as LLMServingSim's benchmark of vLLM writes it, by arrival. meta.json beside it names the workload,
    which tells which prompts begin alike; without it none do.

    Raises MalformedInput for a file that is none, or a meta.json that is no object.
    """
    meta = path.parent / "meta.json"
    workload = ""
    if meta.is_file():
        try:
            workload = Path(str(json.loads(meta.read_text(encoding="utf-8")).get("dataset_path", ""))).stem
        except (OSError, ValueError, AttributeError) as error:
            raise MalformedInput(
                f"{meta} does not describe a run ({error!r}); move it away: without it all prompts begin differently."
            ) from None
    return _requests(rows_of(path), workload)


def rows_of(path: Path) -> list[list[float]]:
    """COLUMNS of a requests.jsonl, by arrival.

    Arrivals are on the wall's clock and tokens on the engine's. The least time between the arrival of a request and its
    being queued by the engine is taken as the difference of the two: then nobody is queued before it arrived.
    """
    try:
        requests = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        apart = min(float(each["queued_ts"]) - float(each["arrival_time"]) for each in requests)
        began = min(float(each["arrival_time"]) for each in requests)
        return sorted(_row(each, began, began + apart) for each in requests)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MalformedInput(
            f"{path} is no requests.jsonl of a vLLM run ({error!r}); give one, or leave path out."
        ) from None


def _row(request: dict[str, Any], began: float, began_engine: float) -> list[float]:
    return [
        round(float(request["arrival_time"]) - began, 6),
        int(request["input_toks"]),
        int(request["output_toks"]),
        round(float(request["first_token_ts"]) - began_engine, 6),
        round(float(request["last_token_ts"]) - began_engine, 6),
    ]


def _requests(rows: Sequence[Sequence[float]], workload: str) -> list[RealRequest]:
    known = files(__package__) / f"{workload}.shared.csv"
    beginnings: dict[int, tuple[int, int]] = {}
    if workload and known.is_file():
        for row in csv.DictReader(known.read_text(encoding="utf-8").splitlines()):
            request, earlier, tokens = (int(row[column]) for column in SHARED)
            beginnings[request] = (earlier, tokens)
    requests = []
    for index, (arrival, prompt, reply, first, last) in enumerate(rows):
        beginning, tokens = beginnings.get(index, (None, 0))
        requests.append(RealRequest(arrival, int(prompt), int(reply), first, last, beginning, tokens))
    return requests
