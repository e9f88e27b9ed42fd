"""Returning conversations for vLLM with a CPU tier and for `vllm_offload`: which tokens each finds, request by request.

`python -m tests.engines.offload_loads [PART ...]` asks the real vLLM the loads whose names contain a PART, or those that are
not recorded. It records in offload_hits.json what vLLM found, and prints the tables of docs/three_bodies.md. One request at
a time begins when the copies of the one before are done; of several at once, the next begins an iteration after one has
ended.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from scipy.stats import kendalltau

from pensieve.core.facts import Admission
from pensieve.core.policies.lru import Lru
from pensieve.core.request import Length, Request, tokens_of
from pensieve.core.scheduler.scheduler import SchedulerSettings
from pensieve.core.session import Session, tokens_in
from pensieve.plugins.caches.vllm_offload import VllmOffload
from pensieve.plugins.engines.base import EngineSetup, Reply
from pensieve.plugins.engines.vllm import Vllm
from pensieve.plugins.vllm.options import Tiers, policy_maker
from pensieve.sim.worker import VirtualClock
from tests.engines.small import setup_of
from tests.invariants import check_cache
from tests.simulated import MACHINE, TalkingEngine, make_engine, policy_context

RECORD, SHAPES = (Path(__file__).with_name(f"offload_{name}.json") for name in ("hits", "shapes"))
BLOCK, BATCH = 32, 128
OWN = ("lru", "arc")
"""vLLM's orders; any other one is an eviction policy of conf/eviction."""
ORDERS = (*OWN, "retention_value", "conversation_lru", "learned_return")


NO_TIME = replace(MACHINE, flops=1e18, memory_bw=1e18, h2d_bw=1e18, d2h_bw=1e18, step_overhead_s=1e-9)
"""So that policies read the seconds that they are told in vLLM: one request differed by a few milliseconds."""


class Hits(NamedTuple):
    """Leading tokens of a prompt that were found on the device, and those found behind them."""

    device: int
    host: int


@dataclass(frozen=True)
class Load:
    """shape: of offload_shapes.json: by request its conversation, the request whose leading tokens it has (of prompt and
    reply), how many of them, and tokens of its own and of its reply. device, host: blocks of the first tier, chunks of the
    second. A policy's clock says the number of the request, in seconds.

    In `strict` shapes conversations come one after the other, in `random` ones at random, and some more often. shared: tokens
    that all begin with. forks: the share of conversations that begin with a part of another one. whole blocks: prompts end
    where a block ends, and some are asked again. weka (of kv-cache-tester), agents (lmcache-agent-trace, mini-swe), dialogues
    (MT-Bench-101): recordings, all Apache-2.0; a token stands for a block of 64, for 16 characters, for a word.
    """

    shape: str
    order: str
    device: int = 32
    host: int = 40
    blocks_per_chunk: int = 1
    prompt_only: bool = False
    at_once: int = 1

    @property
    def name(self) -> str:
        size = f"{self.device} + {self.host} x {self.blocks_per_chunk}"
        more = ", prompts" * self.prompt_only + f", {self.at_once} at once" * (self.at_once > 1)
        return f"{self.shape}, {self.order}, {size}{more}"

    @property
    def cache(self) -> dict[str, Any]:
        """Fields of VllmOffload."""
        order = self.order if self.order in OWN else "eviction"
        return {"order": order, "blocks_per_chunk": self.blocks_per_chunk, "offload_prompt_only": self.prompt_only}

    @property
    def policy(self) -> Callable[..., Any]:
        """What makes the eviction policy."""
        if self.order in OWN:
            return Lru
        setup = self.setup
        bytes_per_token = setup.model.kv_bytes_per_token
        tiers = (BLOCK, self.blocks_per_chunk, self.device, self.host, bytes_per_token)
        make = policy_maker(
            self.order, {"seed": setup.seed}, Tiers(setup.model.architecture or {}, "float32", "cpu", 1, *tiers)
        )
        return lambda context: make()

    @property
    def setup(self) -> EngineSetup:
        host_tokens = self.host * self.blocks_per_chunk * BLOCK
        return setup_of("wide_llama", kv_tokens=self.device * BLOCK, host_tokens=host_tokens, batch_tokens=BATCH)

    @property
    def rows(self) -> list[list[int]]:
        found: list[list[int]] = json.loads(SHAPES.read_text())[self.shape]
        return found

    def turns(self) -> Iterator[tuple[str, Callable[[Mapping[str, list[int]]], list[int]], int]]:
        """Of each request: its conversation, its prompt (of all that was said so far) and the length of its reply."""
        rng = random.Random(self.shape)
        for conversation, parent, keep, new, reply in self.rows:
            own = [rng.randrange(10, 250) for _ in range(new)]
            yield f"{conversation}", partial(_continued, f"#{parent}", keep, own), reply


def _continued(source: str, keep: int, new: list[int], said: Mapping[str, list[int]]) -> list[int]:
    return said.get(source, [])[:keep] + new


LOADS = (
    Load("strict 0", "lru"),
    Load("strict 1", "arc"),
    Load("random 2", "lru"),
    Load("random 3", "arc"),
    Load("random 4", "lru", prompt_only=True),
    Load("random 5, shared 64", "arc", prompt_only=True),
    Load("random 6, shared 64, forks 0.5", "lru", 32, 20, 2),
    Load("random 7, shared 100, forks 0.5", "arc", 32, 14, 3, prompt_only=True),
    Load("strict 8, shared 64", "lru", 24, 90, prompt_only=True),
    Load("random 9, shared 64, forks 0.3", "arc", 24, 45, 2),
    Load("random 10, shared 64, forks 0.3", "lru", 32, 22),
    Load("strict 11", "arc", 24, 60),
    Load("random 12, whole blocks", "lru"),
    Load("strict 13, whole blocks, shared 32", "arc", 24, 60),
    Load("random 14, whole blocks", "lru", 24, 30, 2, prompt_only=True),
)
AT_ONCE = (
    Load("strict 30", "lru", 64, 60, at_once=4),
    Load("random 31, shared 64", "arc", 64, 60, at_once=4),
    Load("random 32, shared 64", "lru", 48, 30, 2, prompt_only=True, at_once=4),
    Load("random 33", "lru", at_once=4),
)
RANKED = (
    *(Load(shape, "lru", host=host) for shape in ("strict 20", "random 21") for host in (40, 60, 90)),
    *(Load(shape, "lru", host=60) for shape in ("random 22, shared 128", "random 23, forks 0.5", "weka", "agents")),
    Load("dialogues", "lru"),
)
"""Asked with each of ORDERS."""


def with_orders(load: Load) -> list[Load]:
    return [replace(load, order=order) for order in ORDERS]


def ours(load: Load) -> list[Hits]:
    """What vllm_offload finds, simulated."""
    cache, host = partial(VllmOffload, **load.cache), load.host * load.blocks_per_chunk
    hardware = NO_TIME if load.at_once == 1 else MACHINE
    engine = make_engine(load.device, host, BLOCK, cache, hardware, load.policy, max_batch_tokens=BATCH)
    return asked(load, engine)[0]


def ours_real(load: Load) -> tuple[list[Hits], list[list[int]]]:
    """What vllm_offload finds on the CPU, and the replies; each is held against plain transformers (see CheckedEngine)."""
    from pensieve.device.asked import ModelAsked
    from pensieve.device.model import load_model
    from tests.exact import CheckedEngine

    setup = setup_of("wide_llama")
    model = load_model(ModelAsked(setup.model, setup.weights, None, None, setup.seed))
    cache = VllmOffload(
        policy=load.policy(policy_context(BLOCK)),
        chunk_tokens=BLOCK,
        gpu_blocks=load.device,
        cpu_blocks=load.host * load.blocks_per_chunk,
        **load.cache,
    )
    engine = CheckedEngine(model, cache, SchedulerSettings(max_batch_tokens=BATCH), 1024)
    try:
        return asked(load, engine)
    finally:
        engine.torch_worker.close()


def asked(load: Load, engine: TalkingEngine) -> tuple[list[Hits], list[list[int]]]:
    """What an engine of ours finds, and its replies."""
    found: dict[int, Hits] = {}
    told = engine.facts.admitted

    def admitted(request: Request, session: Session, admission: Admission, now_s: float) -> None:
        if request.id not in found:  # preempted
            assert admission.found is not None
            found[request.id] = Hits(tokens_in(admission.found.gpu), tokens_in(admission.found.cpu))
        told(request, session, admission, now_s)

    engine.facts.admitted = admitted  # type: ignore[method-assign]
    said: dict[str, list[int]] = {}
    replies: dict[int, list[int]] = {}
    running: dict[int, str] = {}
    ended: list[int] = []

    def step() -> bool:
        for number in ended:
            del running[number]
        ended.clear()
        for event in engine.step(None):
            if event.turn is not None:
                assert event.turn.status == "completed", event.turn.error
                number, reply = event.request_id, list(event.turn.token_ids)
                replies[number] = reply
                said[f"#{number}"] += reply
                ended.append(number)
        check_cache(engine.cache)
        return engine.progressed

    for number, (name, prompt, reply) in enumerate(load.turns()):
        if number == 1 < load.at_once:
            step()  # the others come while the first one is computed
        while len(running) == load.at_once or name in running.values():
            step()
        if isinstance(engine.clock, VirtualClock):
            engine.clock.advance_to(number * 10**9)
        tokens = said[f"#{number}"] = prompt(said)
        running[number] = name
        engine.submit(Request(number, name, number, tokens_of(tokens), Length(reply)))
        while load.at_once == 1 and (step() or running):
            pass
    while running:
        step()
    return [found[number] for number in sorted(found)], [replies[number] for number in sorted(replies)]


def theirs(load: Load, engine: Asked) -> tuple[list[Hits], list[Heard], list[list[int]]]:
    """What the real vLLM finds, which was asked nothing before; the replies, and the prompts."""
    prompts: list[list[int]] = []
    said: dict[str, list[int]] = {}
    heard: list[Heard] = []
    running: dict[Future[Reply], tuple[int, str]] = {}
    found: dict[int, Hits] = {}

    def take() -> None:
        for one in wait(running, return_when=FIRST_COMPLETED).done:
            answer, (number, _) = one.result(), running.pop(one)
            assert answer.cached_tokens is not None
            behind = answer.cached_on_host or 0
            found[number] = Hits(answer.cached_tokens - behind, behind)
            said[f"#{number}"] = [*prompts[number], *heard[number]]

    with ThreadPoolExecutor(load.at_once) as pool:
        for number, (name, prompt, reply) in enumerate(load.turns()):
            while len(running) == load.at_once or name in {other for _, other in running.values()}:
                take()
            prompts.append(prompt(said))
            heard.append(Heard())
            request = Request(number, name, number, tokens_of(prompts[-1]), Length(reply))
            engine.sent.clear()
            running[pool.submit(engine.answer, request, heard[-1])] = number, name
            said[f"#{number}"] = prompts[-1]
            engine.sent.wait()
        while running:
            take()
    return [found[number] for number in sorted(found)], heard, prompts


class Asked(Vllm):
    """An engine for which a request's number is its time. sent: the last request is on its way, so the next one comes behind
    it."""

    @classmethod
    def of(cls, load: Load) -> Asked:
        fields = {"blocks_per_chunk": load.blocks_per_chunk, "offload_prompt_only": load.prompt_only}
        engine = cls(load.setup, policy=load.order, **fields)  # type: ignore[arg-type]
        engine.sent = threading.Event()
        settings = engine.start().settings
        assert (settings["host_chunks"], settings["num_blocks"]) == (load.host, load.device + 1)
        return engine

    sent: threading.Event

    def _send(self, command: Mapping[str, Any]) -> None:
        super()._send({**command, "now_s": int(command["add"])})
        self.sent.set()


class Heard(list[int]):
    """The tokens of a reply."""

    def tell(self, *tokens: int, at_s: float | None = None) -> bool:
        self.extend(tokens)
        return True


def recorded() -> dict[str, list[Hits]]:
    kept: dict[str, Any] = json.loads(RECORD.read_text())
    return {name: [Hits(*one) for one in found] for name, found in kept.items()}


def found_in(hits: Sequence[Hits]) -> int:
    """Tokens, on both tiers."""
    return sum(map(sum, hits))


def compared(load: Load, real: Sequence[Hits]) -> str:
    """A row: tokens that vLLM found by tier, requests that differ, and history found, ours less vLLM's, in points of all
    prompts."""
    own = ours(load)
    device, host = (sum(one) for one in zip(*real, strict=True))
    points = 100 * (found_in(own) - found_in(real)) / asked_tokens(load)
    return f"| {load.name} | {device} | {host} | {differing(real, own)} of {len(real)} | {points:+.2f} |"


def differing(real: Sequence[Hits], own: Sequence[Hits]) -> int:
    """Requests that do not find the same."""
    return sum(a != b for a, b in zip(real, own, strict=True))


def asked_tokens(load: Load) -> int:
    """Tokens of all prompts."""
    return sum(keep + new for _, _, keep, new, _ in load.rows)


def agreement(real: Sequence[Sequence[Hits]], own: Sequence[Sequence[Hits]]) -> float:
    """Kendall's tau-b between two bodies' rankings of the orders by tokens found. A tie in one alone lowers it."""
    return float(kendalltau(*([found_in(hits) for hits in body] for body in (real, own))).statistic)


def main(parts: Sequence[str]) -> None:
    kept = recorded()
    every = (*LOADS, *AT_ONCE, *(one for load in RANKED for one in with_orders(load)))
    for load in every:
        if any(part in load.name for part in parts) or (not parts and load.name not in kept):
            with closing(Asked.of(load)) as engine:
                kept[load.name] = theirs(load, engine)[0]
            RECORD.write_text(json.dumps(kept, separators=(",", ":")) + "\n")
    for load in every:
        print(compared(load, kept[load.name]), flush=True)
    for load in RANKED:
        real, own = [kept[one.name] for one in with_orders(load)], [ours(one) for one in with_orders(load)]
        print(f"| {load.name} | {' | '.join(str(found_in(hits)) for hits in real)} | {agreement(real, own):.2f} |")


if __name__ == "__main__":
    main(sys.argv[1:])
