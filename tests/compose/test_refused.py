"""Every mistake in a configuration is one sentence that names the field, before anything starts."""

import pytest

from pensieve.errors import (
    CapacityError,
    ConfigError,
    EngineMissing,
    HardwareMissing,
    UnsupportedModel,
    WeightsMissing,
)
from pensieve.lab.compose.build import preflight
from pensieve.lab.compose.plan import plan_trial
from tests.composed import checked

TWO = ("hardware=cpu", "hardware.gpus=2", "model.weights=random")
DIVIDED = ["hardware.gpus=2 divides", "change one of the two"]
REPLICAS = ("hardware=replicas", "hardware.device=cpu", "model.weights=random")
AUTO = ("cache.gpu=auto", "hardware=sim_a100_80g")

REFUSED = [
    # -- fields
    (("+cache.gpux=3",), ConfigError, ["The field cache.gpux is unknown; did you mean cache.gpu?"]),
    (("+sead=3",), ConfigError, ["The field sead is unknown; did you mean seed?"]),
    (("seed=x",), ConfigError, ["seed='x' cannot be used"]),
    (("scheduler.swap_out_stop=0.1",), ConfigError, ["shares with 0 <= start <= stop"]),
    (("trial.isolate=maybe",), ConfigError, ["isolate='maybe' cannot be used", "Input should be 'auto'"]),
    (("hardware.replicas=4",), ConfigError, ["replicas need a router: set hardware.router=affinity"]),
    (
        ("hardware.terms.projections=h100", "hardware.terms.attention=roofline"),
        ConfigError,
        ["hardware.terms: terms.projections and", "or neither."],
    ),
    (("experiment_name=${nowhere}",), ConfigError, ["cannot be resolved"]),
    (("+workload.user=3",), ConfigError, ["workload.user", "did you mean workload.users"]),
    # -- the plan
    (("cache.gpu=4096",), ConfigError, ["cache.gpu=4096", "8192 tokens"]),
    (("hardware.device=tpu", "hardware=cpu"), ConfigError, ["hardware.device='tpu'", "cuda"]),
    (("baseline=vllm",), EngineMissing, ["baseline=vllm", "hardware=sim_h100 is simulated"]),
    (
        ("baseline=llama_cpp", "model=opt_125m", "model.weights=random", "hardware=cpu"),
        UnsupportedModel,
        ["this is opt"],
    ),
    (("hardware.gpu_memory='80 tokens'",), ConfigError, ["hardware.gpu_memory is a size"]),
    (("hardware.flops=0",), ConfigError, ["hardware.flops has no value"]),
    (("model.architecture.num_attention_heads=7",), UnsupportedModel, ["attention_heads=7", "num_key_value_heads=4"]),
    (("model.architecture.vocab_size=abc",), UnsupportedModel, ["model.architecture.vocab_size='abc'"]),
    ((*TWO, "hardware.gpus=3"), ConfigError, ["has 4 KV heads,", "among 3; use hardware.gpus=2"]),
    ((*TWO, "cache.disk=1GiB"), ConfigError, [*DIVIDED, "cache.disk=1GiB"]),
    ((*TWO, "baseline=llama_cpp"), ConfigError, [*DIVIDED, "baseline=llama_cpp"]),
    ((*REPLICAS, "baseline=llama_cpp"), ConfigError, ["needs replicas", "change one of the two"]),
    ((*AUTO, "baseline=gpu_only", "baseline.kv_budget=total"), ConfigError, ["kv_budget=total"]),
    ((*AUTO, "model=llama2_70b"), HardwareMissing, ["80.0 GiB on sim_a100_80g", "raise hardware.memory_share"]),
    # -- before it starts
    (("cache.gpu='32 tokens'",), CapacityError, ["cache.gpu='32 tokens'", '"128 tokens"']),
    (("cache.gpu='512 tokens'",), CapacityError, ["longest conversation", "cache.gpu"]),
    (("eviction=lru", "eviction._target_=pensieve.core.policies.no.No"), EngineMissing, ["eviction=lru"]),
    (("model.architecture.vocab_size=200",), ConfigError, ["vocabulary of 259"]),
    (("model=hf",), ConfigError, ["model=hf needs a model: model.hub_id=org/name"]),
    (("hardware=cpu", "model.weights=gguf"), WeightsMissing, ["needs a file: model.gguf_file="]),
    (("scheduler.composition._target_=pensieve.core.scheduler.scheduler.no",), EngineMissing, ["scheduler=unified"]),
    (("hardware=cpu", "attention_backend=triton"), EngineMissing, ["attention_backend=triton needs"]),
    (("+hardware.terms.kernels=h100",), ConfigError, ["The field hardware.terms.kernels is unknown"]),
    (
        ("model=llama3_8b", "hardware=sim_gtx1650", "cache=cramped"),
        HardwareMissing,
        ["needs 15.3 GiB", "4.0 GiB are there", "more devices (hardware.gpus)"],
    ),
    (("cache.cpu=400GB",), HardwareMissing, ["cache.cpu='400GB'", "372.5 GiB", "238.4 GiB"]),
]


@pytest.mark.parametrize(("overrides", "error", "parts"), REFUSED, ids=[" ".join(case[0]) for case in REFUSED])
def test_it_is_refused_in_a_sentence(overrides, error, parts, monkeypatch):
    monkeypatch.setattr("pensieve.lab.compose.plan.cores", lambda: 4)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(error) as caught:
        preflight(plan_trial(checked(*overrides)))
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert "\n" not in str(caught.value)
