"""Make the tables beside this file: `python -m pensieve.lab.workload.vllm_runs.derive FOLDER [WORKLOADS]`.

FOLDER: `llmservingsim/runs` of the measurements, real runs of vLLM 0.19 (LLMServingSim 2.0, MIT, Copyright (c) 2024, CASYS
Lab at KAIST). WORKLOADS: that project's `workloads`, whose token ids tell which prompts begin alike; without it those
tables stay as they are.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pensieve.lab.workload.vllm_runs.reading import COLUMNS, META, SHARED, rows_of

HERE = Path(__file__).parent
RUNS = {"rtx4090_llama3_1_8b": "RTX4090/Llama-3.1-8B", "rtxpro6000_qwen3_32b": "RTXPRO6000/Qwen3-32B"}
WORKLOADS = ("sharegpt-llama-3.1-8b-300-sps10", "sharegpt-qwen3-32b-300-sps10")
BLOCK = 16  # tokens: vLLM finds full blocks only


def derive(folder: Path, workloads: Path | None) -> None:
    for name, place in RUNS.items():
        _write(HERE / f"{name}.csv", COLUMNS, rows_of(folder / place / "requests.jsonl"))
        meta = json.loads((folder / place / "meta.json").read_text(encoding="utf-8"))
        kept = {key: meta[key] for key in META if key in meta}
        (HERE / f"{name}.json").write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    for name in WORKLOADS if workloads else ():
        assert workloads is not None
        lines = (workloads / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        _write(HERE / f"{name}.shared.csv", SHARED, shared([json.loads(line) for line in lines]))


def shared(requests: Sequence[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """By order of arrival: a prompt, an earlier one that begins alike, and how many tokens of whole blocks they share."""
    first: dict[int, int] = {}  # chain of blocks -> the first prompt that has it
    found = []
    for index, request in enumerate(sorted(requests, key=lambda each: float(each["arrival_time_ns"]))):
        ids, chain, blocks, earlier, alike = request["input_tok_ids"], 0, 0, index, True
        for block in range(len(ids) // BLOCK):
            chain = hash((chain, *ids[block * BLOCK : (block + 1) * BLOCK]))
            alike = alike and chain in first
            if alike:
                blocks, earlier = block + 1, first[chain]
            first.setdefault(chain, index)
        if blocks:
            found.append((index, earlier, blocks * BLOCK))
    return found


def _write(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)


if __name__ == "__main__":
    derive(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
