"""Are times to first token as `pensieve advise` predicts them? One recording of real vLLM, other sizes for real.

`python -m tests.engines.first_tokens [SIZE ...]` serves one timed load by vLLM on this CPU behind `pensieve record`, at each
of SIZES, and keeps times and hits in first_tokens.json. It prints the tables of docs/advise.md, `... kept` those of what is
kept: from the recording of one size alone, its machine and all sizes are predicted.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from hydra import compose, initialize_config_dir

from pensieve.core.request import Length, Request, tokens_of
from pensieve.lab.commands.advise.advice import Served, Settings, on_recorded, recorded
from pensieve.lab.commands.advise.replays import Source, Task, replayed
from pensieve.lab.compose.conf import conf_folder, read_option
from pensieve.lab.traffic.table import read
from pensieve.plugins.engines.base import Channel, EngineSetup, Reply
from pensieve.plugins.engines.vllm import VllmHttp
from pensieve.specs import ModelSpec
from tests.engines import calibrate
from tests.engines.calibrate import Row, recorded_by, rows_of, traffic
from tests.engines.offload_loads import OWN, Heard

KEPT = Path(__file__).with_name("first_tokens.json")
BLOCK, REPLY, GAP_S = 32, 12, 1.1


class Size(NamedTuple):
    """Blocks of both tiers, and the order of the CPU's."""

    device: int
    host: int
    order: str = "lru"

    @property
    def name(self) -> str:
        return f"{self.device} + {self.host}, {self.order}" if self.host else f"{self.device}"


SIZES = (
    Size(64, 0), Size(64, 96), Size(96, 0), Size(128, 0), Size(64, 48), Size(64, 160), Size(96, 96), Size(64, 96, "arc"),
    Size(64, 48, "arc"), Size(64, 96, "retention_value"), Size(48, 64),
)  # fmt: skip
"""From the recordings of the first two all are predicted, each for itself too."""


class Asked(NamedTuple):
    at_s: float
    conversation: int
    new: int


def asked() -> list[Asked]:
    """Twelve conversations of five turns, in an order of their own in each round; they come about GAP_S apart."""
    rng, at_s, found = random.Random(7), 0.0, []
    for _ in range(5):
        for one in rng.sample(range(12), 12):
            found.append(Asked(at_s, one, rng.randrange(48, 224)))
            at_s += min(rng.expovariate(1 / GAP_S), 4 * GAP_S)
    return found


def setup(size: Size) -> EngineSetup:
    option = read_option("model", "smollm2_135m")
    architecture = option["architecture"]
    model = ModelSpec.from_architecture("smollm2_135m", architecture, "bfloat16")
    return EngineSetup(
        "tested", model, "random", None, None, 3, "cpu", 1, size.device * BLOCK, size.host * BLOCK, BLOCK, 1024, 8
    )


class Real(calibrate.Served):
    def answer(self, request: Request, channel: Channel) -> Reply:
        return VllmHttp.answer(self, request, channel)


def serve(size: Size) -> list[Row]:
    """Every request at its time, none before the turn before it is over."""
    every = list(enumerate(asked()))
    prompts: dict[int, list[int]] = {}
    replies: dict[int, list[int]] = {}
    order: list[int] = []
    with (
        closing(Real(setup(size), size.order if size.host else None)) as engine,
        tempfile.TemporaryDirectory() as folder,
    ):
        engine.start()
        for number in range(-4, 0):  # the first requests are slower
            engine.answer(Request(number, "warm", 0, tokens_of(range(100, 420)), Length(4)), Heard())
        assert engine._http is not None
        assert engine._http.post("/reset_prefix_cache?reset_external=true").status_code == 200

        def talk(who: int) -> None:
            rng, said = random.Random(who), []
            for number, one in every:
                if one.conversation == who:
                    said += [rng.randrange(20, 49_000) for _ in range(one.new)]
                    time.sleep(max(0.0, began + one.at_s - time.monotonic()))
                    prompts[number], heard = list(said), Heard()
                    order.append(number)
                    engine.answer(Request(number, f"c{who}", number, tokens_of(said), Length(REPLY)), heard)
                    replies[number] = heard.tokens
                    said += heard.tokens

        with recorded_by(engine, out := Path(folder) / "traffic.parquet"):
            began = time.monotonic() + 0.5
            with ThreadPoolExecutor(12) as pool:
                list(pool.map(talk, range(12)))
        found = list(read(out))
    assert [one.prompt_tokens for one in found] == [len(prompts[number]) for number in order], (
        "they came as they were sent"
    )
    return rows_of(found, [prompts[number] for number in order], [replies[number] for number in order])


def fields_of(size: Size) -> list[str]:
    model = setup(size).model
    cpu = [f"cpu_bytes={size.host * BLOCK * model.kv_bytes_per_token}"] if size.host else []
    policy = f"policy={size.order}" if size.order in OWN else f"eviction={size.order}"
    return ["model=smollm2_135m", "model.dtype=bfloat16", "scheduler.max_batch_tokens=1024", *cpu, policy,
            "engine=vllm", f"blocks={size.device + 1}", f"block_tokens={BLOCK}"]  # fmt: skip


class Predicted(NamedTuple):
    """Share of prompt tokens found, and mean and median milliseconds to the first token: of vLLM, and of the prediction."""

    found: tuple[float, float]
    mean_ms: tuple[float, float]
    median_ms: tuple[float, float]

    @property
    def points(self) -> float:
        return 100 * (self.found[1] - self.found[0])

    @property
    def slower(self) -> float:
        return self.mean_ms[1] / self.mean_ms[0] - 1


def predictions(source: Size, sizes: Sequence[Size]) -> Iterator[tuple[Size, Predicted]]:
    """Of other sizes, from the recording of one: its traffic, and the machine that its times tell."""
    known = kept()
    with tempfile.TemporaryDirectory() as folder:
        path, rows = Path(folder) / "traffic.parquet", known[source.name]
        traffic(rows, path)
        advised, served, _ = asked_of(source, path)
        served = on_recorded(served, advised, setup(source).model, path.with_suffix(".machine.json"))
        turns, keys = Counter[int](), []
        for one in rows:
            turns[one.conversation] += 1
            keys.append((str(one.conversation), turns[one.conversation]))
        for size in sizes:
            config = asked_of(size, path)[1].changed(1.0, hardware=served.config["hardware"])
            if size.order not in OWN:
                config["baseline"]["cache"]["order"] = "eviction"
            told, real = replayed(Task(config, advised.conversations)), known[size.name]
            prompts = sum(one.keep + one.new for one in real)
            first, after = [one.first for one in real], [told.turns.ttft_ms[key] for key in keys]
            yield (
                size,
                Predicted(
                    (sum(one.cached for one in real) / prompts, told.rate),
                    (mean(first), mean(after)),
                    (median(first), median(after)),
                ),
            )


def asked_of(size: Size, path: Path) -> tuple[Source, Served, Settings]:
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        return recorded(compose("advise", [*fields_of(size), f"workload.path={path}"]))


def kept() -> dict[str, list[Row]]:
    return {name: [Row(*one) for one in rows] for name, rows in json.loads(KEPT.read_text()).items()}


def main(parts: Sequence[str]) -> None:
    known = kept() if KEPT.exists() else {}
    for size in SIZES:
        if parts != ["kept"] and (size.name in parts or not parts):
            known[size.name] = serve(size)
            KEPT.write_text(json.dumps(known, separators=(",", ":")) + "\n")
    for source in SIZES[:2]:
        for size, one in predictions(source, [size for size in SIZES if size.name in known]):
            print(f"| {source.name} | {size.name} | {one.found[0]:.1%}, {one.found[1]:.1%} | {one.points:+.1f} |"
                  f" {one.mean_ms[0]:.0f}, {one.mean_ms[1]:.0f} | {one.slower:+.1%} |"
                  f" {one.median_ms[0]:.0f}, {one.median_ms[1]:.0f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
