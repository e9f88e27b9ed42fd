"""Shapes of real conversations for offload_loads.py: which earlier prompt each one continues, how far, and by how much.

`python -m tests.engines.offload_shapes DATA` derives offload_shapes.json from recorded workloads: numbers, and no text.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

SHAPES = Path(__file__).with_name("offload_shapes.json")
ROWS, LONGEST, LONGEST_REPLY = 90, 900, 16


class Row(NamedTuple):
    """keep: leading tokens of what request `parent` (-1: none) was asked and answered; new: tokens behind them."""

    conversation: int
    parent: int
    keep: int
    new: int
    reply: int


Ask = tuple[Sequence[Any], Sequence[Any]]
"""A prompt and its reply; an item is a token of the shape."""


def _weka(folder: Path) -> Iterator[list[Ask]]:
    for path in sorted(folder.glob("weka/*.json")):
        asks = [one for one in json.loads(path.read_text())["requests"] if one["type"] in ("n", "s")]
        prompts: list[list[Any]] = [[(path.name, block) for block in one["hash_ids"]] for one in asks]
        following = [*prompts[1:], []]
        yield [
            (own, later[len(own) :][: one["out"] // 64] or [None])
            for one, own, later in zip(asks, prompts, following, strict=True)
        ]


def _agents(folder: Path) -> Iterator[list[Ask]]:
    for path in sorted(folder.glob("agent_sessions/*.jsonl")):
        calls = [json.loads(line) for line in path.read_text().splitlines()]
        yield [(_pieces(one["input"]), _pieces(one["output"])) for one in calls]


def _pieces(text: str) -> list[str]:
    return [text[i : i + 16] for i in range(0, len(text), 16)]


def _dialogues(folder: Path) -> Iterator[list[Ask]]:
    for line in (folder / "mt_bench_101" / "mtbench101.jsonl").read_text().splitlines()[::37]:
        said: list[str] = []
        asks: list[Ask] = []
        for turn in json.loads(line)["history"]:
            said += turn["user"].split()
            asks.append((list(said), turn["bot"].split()))
            said += turn["bot"].split()
        yield asks


KINDS = {
    "weka": (_weka, 6, "callanjfox/kv-cache-tester (WEKA), Apache-2.0; a token stands for a block of 64"),
    "agents": (_agents, 5, "LMCache/lmcache-agent-trace (mini-swe), Apache-2.0; a token stands for 16 characters"),
    "dialogues": (_dialogues, 12, "MT-Bench-101, Apache-2.0; a token stands for a word"),
}
"""By shape: how it is read, how many conversations are open at a time, and the source."""


def rows(sessions: Iterator[list[Ask]], open_at_once: int) -> list[Row]:
    """Of the open conversations one at random goes on. A prompt continues that with which it has most in common."""
    rng = random.Random(0)
    waiting = [list(takewhile(lambda ask: len(ask[0]) + len(ask[1]) < LONGEST, session)) for session in sessions]
    left = [(number, session) for number, session in enumerate(waiting) if session]
    found: list[Row] = []
    said: list[Sequence[Any]] = []
    while left and len(found) < ROWS:
        number, session = left[rng.randrange(min(open_at_once, len(left)))]
        prompt, reply = session.pop(0)
        common = [sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(prompt, one))) for one in said]  # noqa: B905
        keep = max(common, default=0)
        found.append(
            Row(number, common.index(keep) if keep else -1, keep, len(prompt) - keep, min(len(reply), LONGEST_REPLY))
        )
        said.append([*prompt, *reply[:LONGEST_REPLY]])
        left = [one for one in left if one[1]]
    return found


def derived(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        kind: {"source": source, "rows": rows(read(folder), opened)} for kind, (read, opened, source) in KINDS.items()
    }


if __name__ == "__main__":
    SHAPES.write_text(json.dumps(derived(Path(sys.argv[1])), separators=(",", ":")) + "\n")
