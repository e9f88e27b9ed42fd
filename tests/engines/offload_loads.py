"""Returning conversations for vLLM with a CPU tier and for `vllm_offload`: which tokens each finds, request by request.

`python -m tests.engines.offload_loads` asks the real vLLM those loads that are not recorded, or all, says where our engine
differs, and records in offload_hits.json what vLLM found. One request at a time; each begins when the copies of the one
before are done.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pensieve.core.facts import Admission
from pensieve.core.policies.lru import Lru
from pensieve.core.request import Length, Request, tokens_of
from pensieve.core.scheduler.composition import SchedulerSettings
from pensieve.core.session import Session, tokens_in
from pensieve.plugins.caches.vllm_offload import VllmOffload
from pensieve.plugins.engines.vllm import Vllm
from tests.engines.small import setup_of
from tests.simulated import TalkingEngine, make_engine, policy_context

RECORD = Path(__file__).with_name("offload_hits.json")
REQUESTS, BLOCK, BATCH = 90, 32, 128


class Hits(NamedTuple):
    """Leading tokens of a prompt that were found on the device, and those found behind them."""

    device: int
    host: int


@dataclass(frozen=True)
class Load:
    """strict: conversations come one after the other, else at random and some more often. shared: tokens that all of them
    begin with. forks: of the conversations, the share that begins with a part of another one. whole: prompts end where a
    block ends, and some are asked again. device, host: blocks of the first tier, chunks of the second."""

    seed: int
    strict: bool
    order: Literal["lru", "arc"]
    device: int = 32
    host: int = 40
    blocks_per_chunk: int = 1
    prompt_only: bool = False
    shared: int = 0
    forks: float = 0.0
    conversations: int = 9
    whole: bool = False

    @property
    def name(self) -> str:
        how = f"{'strict' if self.strict else 'random'}, {self.order}, {self.device} + {self.host} x {self.blocks_per_chunk}"
        which = f"{', prompts' * self.prompt_only}{', whole blocks' * self.whole}"
        return f"{how}{which}, shared {self.shared}, forks {self.forks}"

    def turns(self) -> Iterator[tuple[str, Callable[[dict[str, list[int]]], list[int]], int]]:
        """Of each request: its conversation, its prompt (of all histories so far) and the length of its reply."""
        rng = random.Random(self.seed)
        opening = [11 + 7 * place % 200 for place in range(self.shared)]
        slots = {slot: f"{slot}.0" for slot in range(self.conversations)}
        length: dict[str, int] = {}
        asked: dict[str, int] = {}
        often = [0, 0, 0, 1, 1, 2, *slots]
        for number in range(REQUESTS):
            slot = number % self.conversations if self.strict else rng.choice(often)
            name, keep, parent = slots[slot], None, None
            if length.get(name, 0) > rng.choice((300, 420)):
                name = slots[slot] = f"{slot}.{number}"
            if name not in length and length and rng.random() < self.forks:
                parent = rng.choice(sorted(length))
                keep = rng.randint(1, length[parent])
            new = [rng.randrange(10, 250) for _ in range(rng.choice((64, 64, 33, rng.randrange(1, 90))))]
            if name not in length and parent is None:
                new = opening + new
            reply = rng.choice((16, 16, 1, rng.randrange(1, 40)))
            before = length.get(name, 0) if parent is None else keep or 0
            if self.whole and parent is None and name in asked and rng.random() < 0.3:
                before, keep, new = asked[name], asked[name], []
            elif self.whole:
                new += [7] * (-(before + len(new)) % BLOCK)
            asked[name] = before + len(new)
            length[name] = before + len(new) + reply

            def prompt(
                said: dict[str, list[int]], source: str = parent or name, keep: int | None = keep, new: list[int] = new
            ) -> list[int]:
                return said.get(source, [])[:keep] + new

            yield name, prompt, reply


LOADS = (
    Load(0, True, "lru"),
    Load(1, True, "arc"),
    Load(2, False, "lru"),
    Load(3, False, "arc"),
    Load(4, False, "lru", prompt_only=True),
    Load(5, False, "arc", prompt_only=True, shared=64),
    Load(6, False, "lru", blocks_per_chunk=2, host=20, shared=64, forks=0.5),
    Load(7, False, "arc", blocks_per_chunk=3, host=14, prompt_only=True, shared=100, forks=0.5),
    Load(8, True, "lru", device=24, host=90, prompt_only=True, shared=64),
    Load(9, False, "arc", device=24, host=45, blocks_per_chunk=2, shared=64, forks=0.3),
    Load(10, False, "lru", host=22, shared=64, forks=0.3),
    Load(11, True, "arc", device=24, host=60, conversations=5),
    Load(12, False, "lru", whole=True),
    Load(13, True, "arc", device=24, host=60, conversations=5, whole=True, shared=32),
    Load(14, False, "lru", device=24, host=30, blocks_per_chunk=2, prompt_only=True, whole=True),
)


def ours(load: Load) -> list[Hits]:
    """What vllm_offload finds, simulated."""
    cache = partial(
        VllmOffload, order=load.order, blocks_per_chunk=load.blocks_per_chunk, offload_prompt_only=load.prompt_only
    )
    host = load.host * load.blocks_per_chunk
    return asked(load, make_engine(load.device, host, BLOCK, cache=cache, max_batch_tokens=BATCH))[0]


def ours_real(load: Load) -> tuple[list[Hits], list[list[int]]]:
    """What vllm_offload finds on the CPU, and the replies; each is held against plain transformers (see CheckedEngine)."""
    from pensieve.device.asked import ModelAsked
    from pensieve.device.model import load_model
    from tests.exact import CheckedEngine

    setup = setup_of("wide_llama")
    model = load_model(ModelAsked(setup.model, setup.weights, None, None, setup.seed))
    cache = VllmOffload(
        policy=Lru(policy_context(BLOCK)),
        chunk_tokens=BLOCK,
        gpu_blocks=load.device,
        cpu_blocks=load.host * load.blocks_per_chunk,
        order=load.order,
        blocks_per_chunk=load.blocks_per_chunk,
        offload_prompt_only=load.prompt_only,
    )
    engine = CheckedEngine(model, cache, SchedulerSettings(max_batch_tokens=BATCH), 1024)
    try:
        return asked(load, engine)
    finally:
        engine.torch_worker.close()


def asked(load: Load, engine: TalkingEngine) -> tuple[list[Hits], list[list[int]]]:
    """What an engine of ours finds, and its replies."""
    found: list[Hits] = []
    told = engine.facts.admitted

    def admitted(request: Request, session: Session, admission: Admission, now_s: float) -> None:
        assert admission.found is not None
        found.append(Hits(tokens_in(admission.found.gpu), tokens_in(admission.found.cpu)))
        told(request, session, admission, now_s)

    engine.facts.admitted = admitted  # type: ignore[method-assign]
    said: dict[str, list[int]] = {}
    replies: list[list[int]] = []
    for number, (name, prompt, reply) in enumerate(load.turns()):
        tokens = prompt(said)
        engine.submit(Request(number, name, number, tokens_of(tokens), Length(reply)))
        events = engine.step(None)
        while engine.progressed:
            events += engine.step(None)
        [turn] = [event.turn for event in events if event.turn is not None]
        assert turn.status == "completed", turn.error
        replies.append(list(turn.token_ids))
        said[name] = [*tokens, *turn.token_ids]
        engine.cache.check()
    return found, replies


def theirs(load: Load) -> tuple[list[Hits], list[Sequence[int]], list[list[int]]]:
    """What the real vLLM finds; the replies, and the prompts."""
    setup = setup_of(
        "wide_llama",
        kv_tokens=load.device * BLOCK,
        host_tokens=load.host * load.blocks_per_chunk * BLOCK,
        batch_tokens=BATCH,
    )
    engine = Vllm(
        setup,
        policy=load.order,
        blocks_per_chunk=load.blocks_per_chunk,
        offload_prompt_only=load.prompt_only,
    )
    settings = engine.start().settings
    found: list[Hits] = []
    replies: list[Sequence[int]] = []
    prompts: list[list[int]] = []
    said: dict[str, list[int]] = {}
    try:
        assert (settings["host_chunks"], settings["num_blocks"]) == (load.host, load.device + 1)
        for number, (name, prompt, reply) in enumerate(load.turns()):
            prompts.append(prompt(said))
            heard = _Heard()
            answer = engine.answer(Request(number, name, number, tokens_of(prompts[-1]), Length(reply)), heard)
            assert answer.cached_tokens is not None and answer.cached_on_host is not None
            found.append(Hits(answer.cached_tokens - answer.cached_on_host, answer.cached_on_host))
            replies.append(heard.tokens)
            said[name] = [*prompts[-1], *heard.tokens]
    finally:
        engine.close()
    return found, replies, prompts


class _Heard:
    """The tokens of a reply."""

    cancelled = False

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def tell(self, *tokens: int, at_s: float | None = None) -> bool:
        self.tokens += tokens
        return True


def recorded() -> dict[str, list[Hits]]:
    kept: dict[str, Any] = json.loads(RECORD.read_text())
    return {name: [Hits(*one) for one in found] for name, found in kept.items()}


def main() -> None:
    kept = recorded()
    for load in [load for load in LOADS if load.name not in kept] or LOADS:
        found, _, _ = theirs(load)
        kept[load.name] = found
        differ = [
            (number, real, own) for number, (real, own) in enumerate(zip(found, ours(load), strict=True)) if real != own
        ]
        device, host = (sum(one) for one in zip(*found, strict=True))
        print(f"| {load.name} | {device} | {host} | {len(differ)} of {len(found)} | {differ[:3]} |", flush=True)
    RECORD.write_text(json.dumps(kept, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
