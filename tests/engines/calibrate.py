"""Does the replay of recorded traffic find what vLLM's server found? Loads of offload_loads.py through `pensieve record`.

`python -m tests.engines.calibrate` asks the real server on a CPU, with a CPU tier and without, one request at a time and four
at once. It keeps in calibration.json what a replay needs (lengths, what a prompt goes on from, times, hits), and prints the
table of docs/advise.md; `python -m tests.engines.calibrate kept` prints it of what is kept. Any other word chooses the loads
whose names have it.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose, initialize_config_dir

from pensieve.core.request import Request
from pensieve.lab.commands.advise.advice import recorded
from pensieve.lab.commands.advise.causes import read_causes
from pensieve.lab.commands.advise.replays import Task, replayed
from pensieve.lab.compose.conf import conf_folder
from pensieve.lab.traffic.table import BLOCK_TOKENS, TOKEN_BYTES, Exchange, Facts, Salt, read, read_facts, write
from pensieve.plugins.engines.base import Channel, EngineSetup, Reply
from pensieve.plugins.engines.vllm import VllmHttp
from tests.engines.offload_loads import BATCH, BLOCK, LOADS, OWN, RANKED, Hits, Load, theirs, with_orders
from tests.engines.offload_loads import recorded as in_vllm
from tests.engines.small import setup_of

ROOT = Path(__file__).parents[2]
KEPT = Path(__file__).with_name("calibration.json")
DEVICE, HOST = 64, 90
PAUSE_S = 0.03
"""Between requests: one comes behind the other, and finds the copies of the one before done."""


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


def loads() -> list[Load]:
    """Eight, each with a CPU tier and without, one request at a time and four at once."""
    eight = (RANKED[0], RANKED[3], *RANKED[6:11], LOADS[12])
    alike: dict[str, Any] = {"device": DEVICE, "conversations": 16, "replies": 4, "order": "lru", "prompt_only": True}
    return [
        replace(one, host=host, at_once=at_once, **alike) for host in (HOST, 0) for at_once in (1, 4) for one in eight
    ]


def name(load: Load) -> str:
    kind = load.shape or ("strict" if load.strict else "random")
    kind += ", forks" * bool(load.forks) + ", shared prompt" * bool(load.shared) + ", whole blocks" * load.whole
    return f"{kind}; {load.at_once} at once; {load.device} + {load.host} blocks"


class Served(VllmHttp):
    """vLLM's server behind the proxy. sent: the last request is on its way."""

    def __init__(self, setup: EngineSetup, policy: str | None) -> None:
        super().__init__(setup)
        if policy is not None:
            self._offload(policy)
        self.sent = threading.Event()

    def _variables(self) -> dict[str, str]:
        return {**super()._variables(), "PYTHONPATH": str(ROOT), "VLLM_SERVER_DEV_MODE": "1"}

    def anew(self, load: Load) -> None:
        assert self._http is not None
        time.sleep(10 * PAUSE_S)  # the last copies
        assert self._http.post("/reset_prefix_cache?reset_external=true").status_code == 200

    def answer(self, request: Request, channel: Channel) -> Reply:
        threading.Timer(PAUSE_S, self.sent.set).start()
        said = super().answer(request, channel)
        time.sleep(PAUSE_S)
        return said


@contextmanager
def recorded_by(engine: VllmHttp, out: Path) -> Iterator[None]:
    """What the engine's client asks goes through `pensieve record`."""
    direct = engine._http
    assert direct is not None
    upstream = str(direct.base_url).rstrip("/")
    command = [sys.executable, "runners/record.py", "--upstream", upstream, "--out", str(out), "--port", "0"]
    with subprocess.Popen([*command, "--token-ids"], cwd=ROOT, stdout=subprocess.PIPE, text=True) as proxy:
        assert proxy.stdout is not None
        engine._connect(proxy.stdout.readline().split(" at ")[1].split(";")[0])
        yield
        assert engine._http is not None
        engine._http.close()
        engine._http = direct
        proxy.send_signal(signal.SIGTERM)


def record(load: Load, engine: Served) -> list[Row]:
    """Ask the load through `pensieve record`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "traffic.parquet"
        engine.anew(load)
        with recorded_by(engine, out):
            hits, replies, prompts = theirs(load, engine)
        found = list(read(out))
        rows = rows_of(found, prompts, replies)
        traffic(rows, derived := Path(folder) / "derived.parquet")
        assert read_facts(out).engine["gpu_tokens"] == load.device * BLOCK
        assert check(load, derived) == check(load, out), "what is kept is replayed as what was recorded"
    assert [one.cached_tokens for one in found] == [one.device for one in hits]
    assert [one.prompt_tokens for one in found] == [len(one) for one in prompts]
    return rows


def rows_of(found: Sequence[Exchange], prompts: Sequence[list[int]], replies: Sequence[Sequence[int]]) -> list[Row]:
    names: dict[str | None, int] = {}
    rows: list[Row] = []
    before = 0.0
    for place, (one, reply) in enumerate(zip(found, replies, strict=True)):
        common = [
            sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(prompts[place], [*prompts[i], *replies[i]])))  # noqa: B905
            for i in range(place)
        ]
        keep = max(common, default=0)
        own = names.setdefault(one.session, len(names))
        assert one.arrival_s is not None and one.first_token_s is not None and one.end_s is not None
        times = (one.arrival_s - before, one.first_token_s - one.arrival_s, one.end_s - one.first_token_s)
        before = one.arrival_s
        parent = common.index(keep) if keep else -1
        sizes = (keep, len(prompts[place]) - keep, len(reply), one.cached_tokens or 0)
        rows.append(Row(own, parent, *sizes, *(round(1e3 * one) for one in times)))
    return rows


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


def check(load: Load, path: Path, *more: str, real: Sequence[Hits] | None = None) -> Apart:
    """What `pensieve advise FILE engine=vllm blocks=N cpu_bytes=N policy=NAME` replays of these requests, beside what the
    recorded engine found. real: beside what another one found."""
    model = setup_of("wide_llama").model
    shape = [f"++model.architecture.{field}={value}" for field, value in model.architecture.items()]
    cpu = (
        [f"cpu_bytes={load.host * BLOCK * model.kv_bytes_per_token // 2}"] if load.host else []
    )  # 16 bits in the replay
    fields = ["model=llama_25m", "model.dtype=bfloat16", *shape, f"scheduler.max_batch_tokens={BATCH}", *cpu, *more]
    fields += ["engine=vllm", f"blocks={load.device + 1}", f"block_tokens={BLOCK}", f"workload.path={path}"]
    fields.append(f"policy={load.order}" if load.order in OWN else f"eviction={load.order}")
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        source, served, _ = recorded(compose("advise", fields))
    config = served.changed(1.0)
    if load.host:  # as the options of `advise` set them
        config["baseline"]["cache"]["offload_prompt_only"] = load.prompt_only
    if load.order not in OWN:
        config["baseline"]["cache"]["order"] = "eviction"
    base = replayed(Task(config, source.conversations))
    sent, turns = read_causes(source.facts, source.rows, source.named).sent, base.turns
    hits = [one.found for one in sent] if real is None else [sum(one) for one in real]
    keys = [(one.session, one.turn) for one in sent]
    found = [(own, int(turns.found[key]), int(turns.prompt[key])) for key, own in zip(keys, hits, strict=True)]
    differ = [place for place, (own, other, _) in enumerate(found) if own != other]
    return Apart(differ, *(sum(column) for column in zip(*found, strict=True)))


def predictions() -> Iterator[tuple[str, Load]]:
    """Of what was recorded with 64 + 90 blocks and lru: sizes and orders of which offload_hits.json has what vLLM found."""
    for source in loads():
        size: dict[str, Any] = {"device": DEVICE, "host": HOST, "prompt_only": True}
        for alike in RANKED:
            conversations = source.conversations if alike.shape else alike.conversations  # a shape has its own
            if replace(alike, **size, conversations=conversations) == source:
                yield from ((name(source), one) for one in with_orders(alike))


def predicted(source: str, load: Load, folder: Path) -> Apart:
    """Policies there read the request's number as seconds: a second between arrivals, and none for the machine."""
    rows = [one._replace(since=1000) for one in kept()[source]]
    traffic(rows, folder / "traffic.parquet")
    return check(load, folder / "traffic.parquet", *NO_TIME, real=in_vllm()[load.name])


def kept() -> dict[str, list[Row]]:
    return {name: [Row(*one) for one in rows] for name, rows in json.loads(KEPT.read_text()).items()}


def main(parts: Sequence[str]) -> None:
    known: dict[str, Any] = kept() if KEPT.exists() else {}
    wanted = [one for one in loads() if parts != ["kept"] and all(part in name(one) for part in parts)]
    for host in (HOST, 0):
        asked = [one for one in wanted if one.host == host]
        if not asked:
            continue
        with closing(Served(asked[0].setup, asked[0].order if host else None)) as engine:
            engine.start()
            for load in asked:
                known[name(load)] = record(load, engine)
                KEPT.write_text(json.dumps(known, separators=(",", ":")) + "\n")
    for load in loads():
        if name(load) in known:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "traffic.parquet"
                traffic(known[name(load)], path)
                found = check(load, path)
            print(f"| {name(load)} | {found.prompts} | {found.engine} | {found.replay} | {found.points:+.2f} |"
                  f" {len(found.requests)} | {found.requests[:8]}", flush=True)  # fmt: skip
    for source, load in predictions():
        with tempfile.TemporaryDirectory() as folder:
            found = predicted(source, load, Path(folder))
        print(
            f"| {load.name} | {found.engine} | {found.replay} | {found.points:+.2f} | {len(found.requests)} |",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
