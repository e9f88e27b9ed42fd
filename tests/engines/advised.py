"""What `pensieve advise` replays and predicts of recordings of vLLM's server, for test_vllm_offload.py and docs/advise.md.

calibration.json: loads of offload_loads.py, asked through `pensieve record`, with a CPU tier and without, one request at a
time and four at once. first_tokens.json: one timed load at each of SIZES. Both keep what a replay needs (lengths, what a
prompt goes on from, times, hits) of vLLM 0.32 on a CPU.
"""

import json
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from hydra import compose, initialize_config_dir

from pensieve.lab.commands.advise.advice import Served, Settings, on_recorded, recorded
from pensieve.lab.commands.advise.causes import Reading
from pensieve.lab.commands.advise.replays import Source, Task, replayed
from pensieve.lab.compose.conf import conf_folder, read_option
from pensieve.lab.traffic.table import BLOCK_TOKENS, TOKEN_BYTES, Exchange, Facts, Salt, write
from pensieve.specs import ModelSpec
from tests.engines.offload_loads import BATCH, BLOCK, OWN, RANKED, Hits, Load, with_orders
from tests.engines.offload_loads import recorded as in_vllm
from tests.engines.small import setup_of

DEVICE, HOST = 64, 90
NO_TIME = (
    "hardware.terms={projections: roofline, attention: roofline}",
    *(f"hardware.{rate}=1e18" for rate in ("flops", "memory_bw", "h2d_bw", "d2h_bw")),
)


class Row(NamedTuple):
    """A request: as in offload_shapes.json, what it found, and milliseconds since the one before, to the first token and to
    the end."""

    conversation: int
    parent: int
    keep: int
    new: int
    reply: int
    cached: int
    since: int
    first: int
    more: int


def kept(name: str) -> dict[str, list[Row]]:
    """By load, or by size."""
    content = json.loads(Path(__file__).with_name(f"{name}.json").read_text())
    return {of: [Row(*one) for one in rows] for of, rows in content.items()}


TURNS = ("strict turns", "random 21", "random turns, shared 128", "random turns, forks 0.5", "weka", "agents", "dialogues",
         "random turns, whole blocks")  # fmt: skip
"""Of sixteen conversations each; where a shape has this name, it is that one."""


def loads() -> list[Load]:
    """Eight, each with a CPU tier and without, one request at a time and four at once."""
    return [
        Load(shape, "lru", DEVICE, host, prompt_only=True, at_once=at_once)
        for host in (HOST, 0)
        for at_once in (1, 4)
        for shape in TURNS
    ]


def traffic(rows: Sequence[Row], path: Path) -> None:
    """The recording, with tokens of its own."""
    salt, fresh = Salt(b"calibration"), iter(range(10**9))
    said: list[list[int]] = []
    exchanges = []
    at_s = 0.0
    for number, one in enumerate(rows):
        prompt = [*(said[one.parent][: one.keep] if one.parent >= 0 else ()), *(next(fresh) for _ in range(one.new))]
        said.append([*prompt, *(next(fresh) for _ in range(one.reply))])
        at_s += one.since / 1e3
        first_s = at_s + one.first / 1e3
        blocks = salt.blocks(array("i", prompt).tobytes(), BLOCK_TOKENS * TOKEN_BYTES)
        whole = salt.blocks(array("i", said[-1]).tobytes(), BLOCK_TOKENS * TOKEN_BYTES, len(blocks))
        exchanges.append(
            Exchange(number, at_s, first_s, first_s + one.more / 1e3, "completed", session=str(one.conversation),
                     prompt_tokens=len(prompt), output_tokens=one.reply, cached_tokens=one.cached, blocks=blocks,
                     output_blocks=whole)
        )  # fmt: skip
    write(path, Facts("proxy", block=BLOCK_TOKENS), exchanges)


class Apart(NamedTuple):
    """Of what vLLM found and a replay: requests that differ, tokens found in both, tokens of the prompts."""

    requests: list[int]
    engine: int
    replay: int
    prompts: int

    @property
    def points(self) -> float:
        return 100 * (self.replay - self.engine) / self.prompts


def advised(path: Path, device: int, host_bytes: int, order: str, *more: str) -> tuple[Source, Served, Settings]:
    """`pensieve advise FILE engine=vllm blocks=N cpu_bytes=N policy=NAME` of vLLM with these tiers."""
    fields = ["engine=vllm", f"blocks={device + 1}", f"block_tokens={BLOCK}", f"workload.path={path}", *more]
    fields += ["model.dtype=bfloat16", f"policy={order}" if order in OWN else f"eviction={order}"]
    fields += [f"cpu_bytes={host_bytes}"] if host_bytes else []
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        return recorded(compose("advise", fields))


def check(load: Load, path: Path, *more: str, real: Sequence[Hits] | None = None) -> Apart:
    """What is replayed of these requests, beside what the recorded engine found. real: beside what another one found."""
    model = setup_of("wide_llama").model
    shape = [f"++model.architecture.{field}={value}" for field, value in model.architecture.items()]
    host_bytes = load.host * BLOCK * model.kv_bytes_per_token // 2  # 16 bits in the replay
    fields = ("model=llama_25m", *shape, f"scheduler.max_batch_tokens={BATCH}", *more)
    source, served, _ = advised(path, load.device, host_bytes, load.order, *fields)
    config = served.changed(1.0)
    if load.host:  # as the options of `advise` set them
        config["baseline"]["cache"]["offload_prompt_only"] = load.prompt_only
    if load.order not in OWN:
        config["baseline"]["cache"]["order"] = "eviction"
    base = replayed(Task(config, source.conversations))
    sent, turns = Reading(source.facts, source.rows, source.named).sent, base.turns
    hits = [one.found for one in sent] if real is None else [sum(one) for one in real]
    keys = [(one.session, one.turn) for one in sent]
    found = [(own, int(turns.found[key]), int(turns.prompt[key])) for key, own in zip(keys, hits, strict=True)]
    differ = [place for place, (own, other, _) in enumerate(found) if own != other]
    return Apart(differ, *(sum(column) for column in zip(*found, strict=True)))


def predictions(ranked: Sequence[Load] = RANKED) -> Iterator[tuple[str, Load]]:
    """Of what was recorded with 64 + 90 blocks and lru: sizes and orders of which offload_hits.json has what vLLM found."""
    for alike in ranked:
        source = Load(alike.shape, "lru", DEVICE, HOST, prompt_only=True)
        if source in loads():
            yield from ((source.name, one) for one in with_orders(alike))


def predicted(source: str, load: Load, folder: Path) -> Apart:
    """Policies there read the request's number as seconds: a second between arrivals, and none for the machine."""
    rows = [one._replace(since=1000) for one in kept("calibration")[source]]
    traffic(rows, folder / "traffic.parquet")
    return check(load, folder / "traffic.parquet", *NO_TIME, real=in_vllm()[load.name])


# -- times to first token --------------------------------------------------------------------------------------------------


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


class Predicted(NamedTuple):
    """points: of the prompts, found more than by vLLM. slower: the share by which the mean time to first token is longer."""

    points: float
    slower: float


def first_tokens(source: Size, sizes: Sequence[Size], path: Path) -> Iterator[tuple[Size, Predicted]]:
    """Of other sizes, from the recording of one: its traffic, and the machine that its times tell."""
    name = "smollm2_135m"
    model = ModelSpec.from_architecture(name, read_option("model", name)["architecture"], "bfloat16")

    def of(size: Size) -> tuple[Source, Served, Settings]:
        host_bytes = size.host * BLOCK * model.kv_bytes_per_token
        return advised(path, size.device, host_bytes, size.order, f"model={name}", "scheduler.max_batch_tokens=1024")

    known = kept("first_tokens")
    traffic(rows := known[source.name], path)
    conversations, served, _ = of(source)
    served = on_recorded(served, conversations, model, path.with_suffix(".machine.json"))
    turns, keys = Counter[int](), []
    for one in rows:
        turns[one.conversation] += 1
        keys.append((str(one.conversation), turns[one.conversation]))
    for size in sizes:
        config = of(size)[1].changed(1.0, hardware=served.config["hardware"])
        if size.order not in OWN:
            config["baseline"]["cache"]["order"] = "eviction"
        told, real = replayed(Task(config, conversations.conversations)), known[size.name]
        found = sum(one.cached for one in real) / sum(one.keep + one.new for one in real)
        slower = mean(told.turns.ttft_ms[key] for key in keys) / mean(one.first for one in real) - 1
        yield size, Predicted(100 * (told.rate - found), slower)
