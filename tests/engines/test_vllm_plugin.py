"""Our eviction policies as vLLM's CachePolicy: on a stand-in of its contract's types, and inside the real vLLM."""

import json
import logging
import os
import random
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pensieve.core.policies.base import EvictionPolicy, PolicyContext
from pensieve.core.session import Session
from pensieve.errors import ConfigError, PolicyError
from pensieve.lab.compose.conf import options
from pensieve.plugins.engines.process import QUIET
from pensieve.plugins.engines.vllm import Vllm
from pensieve.plugins.vllm.chunks import ACTION, TailPolicy
from pensieve.plugins.vllm.options import Tiers, policy_maker, refuse_untested
from pensieve.sim.machine_profile import Grid, MachineProfile
from pensieve.sim.profile import Profile
from tests.engines.small import ARCHITECTURES, NEEDS_VLLM, setup_of

H100, BLOCK, LLAMA = "NVIDIA H100 80GB HBM3", 32, ARCHITECTURES["llama"]
TIERS = Tiers(LLAMA, "float32", H100, 1, BLOCK, 1, 100, 400, 256)


@dataclass
class Request:
    """vLLM's ReqContext: of a prompt with these chunks."""

    req_id: str
    keys: list[bytes]
    kv_transfer_params: dict[str, Any] | None = None
    kv_hints: Any = None

    def __post_init__(self) -> None:
        self.ends = {key: end for end, key in enumerate(self.keys, 1)}

    def get_offload_key_position(self, key: bytes) -> int:
        return BLOCK * self.ends[key]


class Tier:
    """What vLLM's CPUOffloadingManager does with a policy, for requests that come one after the other."""

    def __init__(self, name: str = "conversation_lru", chunks: int = 400, **extra: Any) -> None:
        self.now_s, self.chunks = 0.0, chunks
        make = policy_maker(name, extra, replace(TIERS, chunks=chunks))
        self.policy = TailPolicy(make, chunks, BLOCK, clock=lambda: self.now_s)
        self.there: set[bytes] = set()
        self.number = 0

    def ask(self, said: bytes | list[bytes], name: str | None = None, hints: Any = None, **hint: Any) -> int:
        """A prompt of chunks: returns how many leading ones it finds."""
        keys = [bytes(said[: end + 1]) for end in range(len(said))] if isinstance(said, bytes) else said
        self.now_s, self.number = self.now_s + 1, self.number + 1
        params = {**({} if name is None else {"session": name}), **hint}
        request = Request(f"r{self.number}", keys, params or None, hints)
        found = next((index for index, key in enumerate(keys) if self.policy.get(key) is None), len(keys))
        missed = [key for key in keys if self.policy.get(key) is None]
        reused = set(keys) - set(missed)
        if missed:
            self.policy.on_store_miss(missed, request)
        room = self.chunks - len(self.there)
        gone = self.policy.evict(max(0, len(missed) - room), set(keys))
        assert gone is not None and len(gone) == max(0, len(missed) - room)
        assert {key for key, _ in gone} <= self.there - set(keys)
        self.there -= {key for key, _ in gone}
        for key in missed:
            self.policy.insert(key, SimpleNamespace(ref_cnt=0))
            self.there.add(key)
        self.now_s += 1
        self.policy.on_request_finished((tuple(keys),), set(missed), reused, request)
        assert self.chunks > 1000 or all(self.policy.get(key) is not None for key in self.there)
        return found

    def left(self, said: bytes) -> int:
        return sum(self.policy.get(bytes(said[: end + 1])) is not None for end in range(len(said)))


NAMES = [name for name in options("eviction") if name not in ("belady", "oracle_hint", "noisy_hint")]


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_evicts_from_the_tail_and_keeps_what_is_in_use(name: str) -> None:
    tier, rng = Tier(name, chunks=40), random.Random(0)
    histories = {user: bytes([user]) for user in range(8)}
    for _ in range(150):
        user = rng.randrange(8)
        histories[user] += bytes(rng.randrange(1, 200) for _ in range(rng.randrange(1, 4)))
        if len(histories[user]) > 20:
            histories[user] = bytes([user, rng.randrange(200)])
        tier.ask(histories[user], f"user {user}", stop_reason=rng.choice(["tool_use", "end_turn"]), tool="bash")
        for said in histories.values():
            leading = [tier.policy.get(said[: end + 1]) is not None for end in range(len(said))]
            assert sorted(leading, reverse=True) == leading, "no hole before what is kept"
    assert tier.policy.failure is None


@pytest.mark.parametrize("named", [True, False])
def test_a_conversation_is_named_or_goes_on_with_the_last_full_chunk(
    named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whole conversations leave, so whoever was asked last keeps all of it, however long ago it began."""
    caplog.set_level(logging.INFO, "vllm.pensieve")
    tier = Tier(chunks=12)
    for said, name in ((b"abc", "a"), (b"xyz", "x"), (b"abcd", "a"), (b"ghijk", "g")):
        tier.ask(said, name if named else None)
    assert (tier.left(b"abcd"), tier.left(b"xyz"), tier.left(b"ghijk")) == (4, 3, 5)
    tier.ask(b"lm", "l" if named else None)
    assert (tier.left(b"abcd"), tier.left(b"xyz")) == (4, 1), "of the one that was asked longest ago, the tail"
    tier.ask(b"xyzw", "x" if named else None)
    assert tier.left(b"xyzw") == 4 and tier.left(b"abcd") == 1, "its evicted end is known, so it is the same one"
    assert sum("names no session" in line for line in caplog.messages) == (0 if named else 1)


def test_a_kv_hint_names_the_conversation_and_when_it_returns() -> None:
    tier = Tier("hinted", chunks=4)
    tier.ask(b"ab", "waits for a tool", expected_s=5.0, tool="bash")
    done = SimpleNamespace(action_type=ACTION, payload={"session": "done", "expected_s": 5000.0})
    tier.ask(b"xy", hints=SimpleNamespace(actions=[done]))
    gone = tier.policy.evict(2, set())
    assert gone is not None and [key for key, _ in gone] == [b"xy", b"x"]


class Faulty(EvictionPolicy):
    def __init__(self, context: PolicyContext, where: str) -> None:
        super().__init__(context)
        self.where, self.calls = where, 0

    def _fails(self, where: str) -> bool:
        self.calls += 1
        if where == self.where and self.calls > 30:
            raise RuntimeError("no such thing")
        return self.where == "kind"

    def order(self, session: Session, chunk: int) -> Any:
        return object() if self._fails("order") else -session.last_active_s

    def score(self, bucket: Any, order: float, now_s: float) -> float:
        self._fails("score")
        return order

    def observe(self, session: Session, now_s: float) -> None:  # type: ignore[override]
        self._fails("observe")

    def rest(self, session: Session, now_s: float) -> None:  # type: ignore[override]
        self._fails("rest")


@pytest.mark.parametrize("where", ["order", "score", "kind", "observe", "rest"])
def test_what_a_policy_raises_reaches_no_request_and_lru_goes_on(where: str, caplog: pytest.LogCaptureFixture) -> None:
    faulty, plain = Tier(f"{__name__}.Faulty", 20, policy_fields={"where": where}), Tier(chunks=20)
    rng = random.Random(1)
    for _ in range(80):
        said = bytes([rng.randrange(9), 1, 2, 3][: rng.randrange(1, 5)])
        faulty.ask(said, str(said[0]))
        plain.ask(said, str(said[0]))
    assert isinstance(faulty.policy.failure, RuntimeError | PolicyError) and plain.policy.failure is None
    assert sum("failed" in line for line in caplog.messages) == 1
    assert faulty.policy.by_lru > 0
    faulty.ask(b"\xffabcdefghijklmnopqrs", "last")
    assert faulty.left(b"\xffabcdefghijklmnopqrs") == 20, "the most recent is kept by lru, and went first by the policy"


def test_a_request_finds_too_few_and_nothing_has_changed() -> None:
    tier = Tier(chunks=4)
    tier.ask(b"abc", "a")
    assert tier.policy.evict(4, set()) is None and tier.policy.evict(3, {b"ab"}) is None
    assert tier.left(b"abc") == 3
    chunk = tier.policy.get(b"abc")
    chunk.ref_cnt = 1
    gone = tier.policy.evict(2, set())
    assert gone is not None and [key for key, _ in gone] == [b"ab", b"a"], "a chunk that is read stays"
    tier.policy.clear()
    assert tier.policy.get(b"abc") is None and tier.policy.evict(1, set()) is None


def test_a_version_of_vllm_that_is_not_tested_is_refused_with_the_command_that_tests_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PENSIEVE_VLLM_UNTESTED", raising=False)  # make vllm-compat sets it
    refuse_untested("0.32.1")
    with pytest.raises(ConfigError, match=r"make vllm-compat VLLM=vllm==0\.33\.0"):
        refuse_untested("0.33.0")
    with pytest.raises(ConfigError, match="reads the future"):
        policy_maker("belady", {}, TIERS)
    monkeypatch.setenv("PENSIEVE_VLLM_UNTESTED", "1")
    refuse_untested("0.33.0")


def test_a_profile_of_this_model_says_what_chunks_cost(tmp_path: Path) -> None:
    """Of a block of vLLM, its share of the chunk that was measured; another model's profile is refused."""
    grid = Grid(rows=(1,), columns=(1,), seconds=((1.0,),))
    times = dict.fromkeys(("h2d_block_s", "d2h_block_s", "overhead_s"), 0.001)
    costs = Profile(64, {64: 0.1, 128: 0.25, 256: 0.7}, 0.004, {})
    made = {"prefill": grid, "decode": grid, "reply": grid, "overlaps": False, "where": {}, "measured": {}}
    MachineProfile(costs=costs, block_bytes=64 * 256, **times, **made).write(tmp_path / "p.json")
    extra = {"profile": str(tmp_path / "p.json")}
    context = policy_maker("lru", extra, TIERS)().context
    assert context.recompute_s(256) == pytest.approx(costs.recompute_s(256) / 2) and context.load_s == 0.002
    with pytest.raises(ConfigError, match="has 256 bytes a token there, and 512 here"):
        policy_maker("lru", extra, replace(TIERS, kv_bytes_per_token=512))


def test_costs_are_the_roofline_s_of_the_card_that_vllm_reports() -> None:
    """A card of another rate changes the scale alone; one that is not known has the rate of an A100."""
    h100, a100, unknown = (
        policy_maker("lru", {}, replace(TIERS, device=device))().context.recompute_s
        for device in (H100, "NVIDIA A100-SXM4-80GB", "cpu")
    )
    for end in (32, 4096):
        assert a100(end) == unknown(end) == pytest.approx(h100(end) * 989.4 / 312)
    layer = LLAMA["hidden_size"] * (2 * 32 + 2 * 16) + 3 * LLAMA["hidden_size"] * LLAMA["intermediate_size"]
    pairs = 4 * LLAMA["num_hidden_layers"] * LLAMA["hidden_size"] * sum(range(33))
    assert h100(32) == pytest.approx((BLOCK * 2 * LLAMA["num_hidden_layers"] * layer + pairs) / 989.4e12)


CONTRACT = Path(__file__).with_name("vllm_contract.py")


@NEEDS_VLLM
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_policy_keeps_the_contract_of_vllm_s_own_manager() -> None:
    """And what stands for one that has failed is vLLM's own lru, chunk for chunk."""
    engine = Vllm(setup_of("wide_llama"))
    command = [str(engine.python), str(CONTRACT), "lru", "vllm_contract.Broken", *NAMES]
    variables = {**os.environ, **QUIET, **engine._variables()}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    lru = found["lru True"]["gone"]
    assert len(lru) > 1000
    for named in (True, False):
        broken = found.pop(f"vllm_contract.Broken {named}")
        assert (broken["failure"], broken["gone"]) == ("RuntimeError('broken')", lru)
    assert {name: one["failure"] for name, one in found.items() if one["failure"]} == {}
    assert found["fifo True"]["gone"] != lru != found["retention_value True"]["gone"]


def test_the_plugin_needs_no_library_that_vllm_does_not_bring():
    """Hydra and OmegaConf are where experiments run, and vLLM's environment need not have them."""
    blocked = "import sys; sys.modules.update(hydra=None, omegaconf=None); "
    done = subprocess.run([sys.executable, "-c", blocked + "import pensieve.plugins.vllm.options"], check=False)
    assert done.returncode == 0
