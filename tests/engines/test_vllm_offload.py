"""vllm_offload finds what the real vLLM with its CPU tier found; so does a replay of recorded traffic, as kept."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from pensieve.core.request import Length, Request
from pensieve.errors import ConfigError, ContextLengthError
from pensieve.plugins.engines.vllm import Vllm
from pensieve.plugins.engines.weights import plain_module
from tests.engines.advised import SIZES, check, first_tokens, kept, loads, predicted, predictions, traffic
from tests.engines.offload_loads import (
    AT_ONCE,
    LOADS,
    OWN,
    RANKED,
    Asked,
    Heard,
    Load,
    agreement,
    asked_tokens,
    differing,
    found_in,
    ours,
    ours_real,
    recorded,
    theirs,
    with_orders,
)
from tests.engines.small import NEEDS_VLLM, greedy, prompt, setup_of


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_the_simulation_finds_what_vllm_found(load: Load) -> None:
    """As recorded of vLLM 0.32 on a CPU: python -m tests.engines.offload_loads."""
    found = ours(load)
    assert found == recorded()[load.name]
    assert (sum(one.host for one in found) > 300) == (load.host * load.blocks_per_chunk > load.device), (
        "what is stored at once and is not larger than the device holds what that holds"
    )


ONE_SIZE = (RANKED[1], RANKED[4], *RANKED[6:])
"""Of loads that differ in the CPU tier alone the middle one; docs/three_bodies.md has them all."""


@pytest.mark.parametrize("load", ONE_SIZE, ids=lambda load: load.name)
def test_five_orders_find_and_rank_the_same_in_vllm_and_simulated(load: Load) -> None:
    loads, kept = with_orders(load), recorded()
    real, own = [kept[one.name] for one in loads], [ours(one) for one in loads]
    assert len({found_in(hits) for hits in real}) > 1, "orders that find the same rank nothing"
    for one, theirs_, ours_ in zip(loads, real, own, strict=True):
        assert differing(theirs_, ours_) <= (0 if one.order in OWN else 0.04 * len(load.rows))
    assert agreement(real, own) >= 0.9


@pytest.mark.parametrize("load", AT_ONCE, ids=lambda load: load.name)
def test_four_at_once_find_nearly_as_much_as_in_vllm(load: Load) -> None:
    """Goal: within a point of the prompts; two of the four miss it."""
    real, own = recorded()[load.name], ours(load)
    assert abs(found_in(own) - found_in(real)) <= 0.02 * asked_tokens(load)
    assert differing(real, own) <= 0.1 * len(load.rows)


@pytest.mark.slow
@pytest.mark.timeout(900)
@NEEDS_VLLM
@pytest.mark.usefixtures("one_cache")
def test_three_bodies_find_the_same_and_answer_as_without_a_cache() -> None:
    """vLLM itself, our engine, and its simulation, with an order of ours."""
    load = replace(LOADS[9], order="fifo")
    with closing(Asked.of(load)) as engine:
        found, replies, prompts = theirs(load, engine)
        with pytest.raises(ContextLengthError):
            engine.answer(Request(999, "long", 1, prompt(1100), Length(2)), Heard())
    own_found, own_replies = ours_real(load)
    assert found == own_found == ours(load) != ours(LOADS[9]), "our engine is its own simulation"
    assert own_replies == replies
    module = plain_module(setup_of("wide_llama"))
    loaded = [number for number, one in enumerate(found) if one.host][:12]
    assert loaded
    for number in loaded:
        assert replies[number] == greedy(module, prompts[number], len(replies[number]))  # type: ignore[arg-type]


def test_a_cpu_tier_is_made_of_whole_chunks_of_the_budget() -> None:
    setup = setup_of("wide_llama", host_tokens=1000)
    fields = Vllm(setup, policy="arc", blocks_per_chunk=2, offload_prompt_only=False)._fields["kv_transfer_config"]
    extra = fields["kv_connector_extra_config"]
    assert extra["cpu_bytes_to_use"] == 15 * 64 * setup.model.kv_bytes_per_token
    assert (extra["eviction_policy"], extra["blocks_per_chunk"], extra["offload_prompt_only"]) == ("arc", 2, False)
    assert fields["kv_connector"] == "PensieveConnector", "it has copies for a CPU"
    on_cuda = replace(setup, device="cuda:0")
    theirs = Vllm(on_cuda, policy="lru")._fields["kv_transfer_config"]
    assert theirs["kv_connector"] == "OffloadingConnector", "there vLLM has its own"
    ours = Vllm(on_cuda, policy="hinted", policy_fields={"within_s": 3})._fields["kv_transfer_config"]
    assert ours["kv_connector"] == "PensieveConnector"
    changed = {"eviction_policy": "hinted", "policy_fields": {"within_s": 3}, "profile": None, "seed": setup.seed}
    assert ours["kv_connector_extra_config"] == theirs["kv_connector_extra_config"] | changed
    assert "kv_transfer_config" not in Vllm(setup)._fields
    assert Vllm(setup, policy="lru")._settings({})["cpu_tokens"] == 31 * 32
    with pytest.raises(ConfigError, match=r"raise cache\.cpu"):
        Vllm(setup, policy="lru", blocks_per_chunk=32)


AT_AN_EDGE = {
    "strict turns, lru, 64 + 90 x 1, prompts, 4 at once": 11.0,
    "weka, lru, 64 + 0 x 1, prompts, 4 at once": 1.5,
}
"""Points: where lru finds all or nothing of a conversation, the order in which replies end decides (docs/advise.md)."""


@pytest.mark.parametrize("load", loads(), ids=lambda load: load.name)
def test_advise_replays_what_the_server_found(load: Load, tmp_path: Path) -> None:
    traffic(kept("calibration")[load.name], tmp_path / "traffic.parquet")
    found = check(load, tmp_path / "traffic.parquet")
    if load.at_once == 1:
        assert not found.requests and found.engine > 0
    assert abs(found.points) <= AT_AN_EDGE.get(load.name, 1.0)


@pytest.mark.parametrize(("source", "load"), [pytest.param(*one, id=one[1].name) for one in predictions(ONE_SIZE)])
def test_a_recording_of_one_size_predicts_others_and_other_orders(source: str, load: Load, tmp_path: Path) -> None:
    assert not predicted(source, load, tmp_path).requests


MISSED = {"64 + 96, arc": 0.18, "48 + 64, lru": 0.33}
"""Share by which the prediction is too fast there (docs/advise.md)."""


def test_times_to_first_token_are_predicted_from_a_recording_without_a_cpu_tier(tmp_path: Path) -> None:
    source, *others = SIZES
    for size, one in first_tokens(source, others, tmp_path / "traffic.parquet"):
        assert abs(one.points) <= 1.0 and abs(one.slower) <= MISSED.get(size.name, 0.15), size.name
