import dataclasses
from types import SimpleNamespace

import pytest
import torch

from pensieve.errors import CapacityError, ConfigError, EngineMissing, HardwareMissing, UnsupportedModel, WeightsMissing
from pensieve.lab.compose import plan_trial
from pensieve.lab.compose.machine import Device, find_device
from pensieve.lab.compose.plan import model_spec
from pensieve.lab.compose.preflight import check_memory, preflight
from pensieve.lab.compose.schema import HardwareConfig
from tests.composed import checked

KV_8B = 2 * 32 * 8 * 128 * 2


def test_budgets_are_whole_blocks_times_the_devices():
    plan = plan_trial(checked("model=llama3_8b", "cache=small", "hardware=sim_a100_80g", "hardware.gpus=2"))
    assert plan.model.kv_bytes_per_token == KV_8B
    assert plan.budget_gpu_blocks == 2 * (2 * 10**9 // KV_8B // 32)
    assert plan.budget_cpu_blocks == 2 * (20 * 10**9 // KV_8B // 32)
    assert plan.gpu_bytes == plan.gpu_blocks * 32 * KV_8B
    assert plan.hardware.gpu_memory_bytes == 80 * 2**30
    assert plan.weights == "none"
    assert "15,168 tokens" not in plan.budget()
    assert f"{plan.budget_gpu_blocks * 32:,} tokens" in plan.budget()


def test_a_size_without_a_unit_is_gigabytes_and_a_note_says_so():
    one, said = (plan_trial(checked(f"cache.gpu={size}", "cache.cpu=0")) for size in ("2", "2GB"))
    assert one.gpu_blocks == said.gpu_blocks == 2 * 10**9 // one.block_bytes
    assert "note: cache.gpu=2 without a unit is taken for GB" in one.budget()
    assert "note" not in said.budget()
    assert (
        plan_trial(checked("cache.gpu=0.5", "cache.cpu=1")).budget().count("cache.gpu=0.5 and cache.cpu=1 without") == 1
    )


@pytest.mark.parametrize(
    ("overrides", "gpu", "cpu"),
    [
        (("baseline=pensieve",), 128, 64),
        (("baseline=gpu_only",), 128, 0),
        (("baseline=stateless",), 128, 0),
        (("baseline=gpu_only", "baseline.kv_budget=total"), 192, 0),
        (("baseline=pensieve", "baseline.kv_budget=total"), 128, 64),
    ],
)
def test_what_a_baseline_makes_of_the_budget(overrides, gpu, cpu):
    plan = plan_trial(checked("cache.gpu='4096 tokens'", "cache.cpu='2048 tokens'", *overrides))
    assert (plan.gpu_blocks, plan.cpu_blocks) == (gpu, cpu)
    assert (plan.budget_gpu_blocks, plan.budget_cpu_blocks) == (128, 64)


def test_auto_is_float32_on_a_cpu_and_bfloat16_elsewhere():
    config = checked()
    assert plan_trial(config).model.dtype == "bfloat16"
    cpu = find_device(HardwareConfig(name="cpu", simulated=False, device="cpu"))
    assert model_spec(config.model, cpu).dtype == "float32"
    assert model_spec(checked("model.dtype=bfloat16").model, cpu).dtype == "bfloat16"
    assert model_spec(checked("model.dtype=float16").model, cpu).kv_bytes_per_token * 2 == (
        model_spec(checked("model.dtype=float32").model, cpu).kv_bytes_per_token
    )


@pytest.mark.parametrize(
    ("overrides", "error", "parts"),
    [
        (("cache.gpu=4096",), ConfigError, ["cache.gpu=4096", "8192 tokens"]),
        (("hardware.device=tpu", "hardware=cpu"), ConfigError, ["hardware.device='tpu'", "cuda:<index>"]),
        (("model.quantization=int8",), ConfigError, ["model.quantization=int8", "hardware=cpu"]),
        (("model.quantization=int8", "hardware=cpu", "model.dtype=bfloat16"), ConfigError, ["model.dtype=bfloat16"]),
        (("model.quantization=int4",), ConfigError, ["model.quantization='int4'", "int8"]),
        (("baseline=vllm",), EngineMissing, ["baseline=vllm"]),
        (("+workload.missing=later",), EngineMissing, ["workload=chat", "later"]),
        (("hardware.gpu_memory=80",), ConfigError, ["hardware.gpu_memory"]),
        (("hardware.flops=0",), ConfigError, ["hardware.flops"]),
        (
            ("model.architecture.num_attention_heads=7",),
            UnsupportedModel,
            ["num_attention_heads=7", "num_key_value_heads=4"],
        ),
        (("model.architecture.hidden_size=-3",), UnsupportedModel, ["model.architecture.hidden_size=-3 of model tiny"]),
        (("model.architecture.vocab_size=abc",), UnsupportedModel, ["model.architecture.vocab_size='abc'"]),
    ],
)
def test_what_cannot_be_planned(overrides, error, parts):
    with pytest.raises(error) as caught:
        plan_trial(checked(*overrides))
    assert all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize(
    ("overrides", "error", "parts"),
    [
        (("cache.gpu='32 tokens'",), CapacityError, ["cache.gpu='32 tokens'", '"128 tokens"']),
        (("cache.gpu='512 tokens'",), CapacityError, ["longest conversation", "cache.gpu"]),
        (("eviction=lru", "eviction._target_=pensieve.core.policies.no.No"), EngineMissing, ["eviction=lru"]),
        (
            ("scheduler.composition._target_=pensieve.core.scheduler.composition.no",),
            EngineMissing,
            ["scheduler=unified"],
        ),
        (("+workload.user=3",), ConfigError, ["workload.user", "did you mean workload.users"]),
        (
            ("model=llama3_8b", "hardware=sim_gtx1650", "cache=cramped"),
            HardwareMissing,
            ["needs 15.3 GiB", "4.0 GiB are there", "hardware.gpus=8"],
        ),
        (
            ("hardware=sim_h100", "hardware.router=affinity", "hardware.replicas=1000000000"),
            HardwareMissing,
            ["hardware.replicas=1,000,000,000 are engines that take at least 9.1 TiB", "would fit"],
        ),
        (("cache.cpu=400GB",), HardwareMissing, ["cache.cpu='400GB'", "372.5 GiB", "238.4 GiB"]),
    ],
)
def test_preflight_refuses_in_a_sentence(overrides, error, parts):
    with pytest.raises(error) as caught:
        preflight(plan_trial(checked(*overrides)))
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_cpu_holds_both_tiers_and_says_what_to_use_instead():
    plan = plan_trial(checked("model=llama3_8b", "cache=small"))
    machine = Device("cpu", "cpu", "cpu", "this CPU", 1, 24 * 2**30, 24 * 2**30)
    plan = dataclasses.replace(plan, device=machine)
    with pytest.raises(HardwareMissing) as caught:
        check_memory(plan)
    for part in ("for the CPU tier", "24.0 GiB are there", "hardware=sim_a100_80g", "model=tiny", "a smaller cache"):
        assert part in str(caught.value)
    check_memory(plan, free_bytes=2**40)


def test_weights_that_cannot_be_had(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    gqa = checked("model=llama2_13b_gqa", "model.weights=hub").model
    from pensieve.lab.compose.weights import check_weights

    with pytest.raises(WeightsMissing, match=r"model\.weights=random"):
        check_weights(gqa)
    with pytest.raises(WeightsMissing, match=r"config\.json"):
        check_weights(checked(f"model.weights={tmp_path}").model)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(WeightsMissing, match="no safetensors"):
        check_weights(checked(f"model.weights={tmp_path}").model)
    (tmp_path / "model.safetensors").write_bytes(b"")
    check_weights(checked(f"model.weights={tmp_path}").model)
    check_weights(checked().model)


def test_a_cpu_has_no_more_devices_than_cores(monkeypatch):
    monkeypatch.setattr("pensieve.lab.compose.machine.cores", lambda: 2)
    with pytest.raises(
        HardwareMissing, match=r"hardware\.gpus=8: on the CPU .* 2 cores.*=sim_a100_80g hardware\.gpus=8"
    ):
        find_device(HardwareConfig(name="cpu", simulated=False, device="cpu", gpus=8))
    device = find_device(HardwareConfig(name="cpu", simulated=False, device="cpu", gpus=2))
    assert (device.count, device.names, device.divided) == (2, ("cpu", "cpu"), True)
    assert device.gpu_bytes == find_device(HardwareConfig(name="cpu", simulated=False, device="cpu")).gpu_bytes


TWO = ("hardware=cpu", "hardware.gpus=2", "model.weights=random")


def test_a_model_is_divided_by_its_kv_heads(monkeypatch):
    monkeypatch.setattr("pensieve.lab.compose.machine.cores", lambda: 4)
    one, two = (plan_trial(checked(*TWO, "cache.gpu=64MiB", f"hardware.gpus={gpus}")) for gpus in (1, 2))
    assert two.gpu_blocks == 2 * one.gpu_blocks, "cache.gpu is a device's"
    assert two.hardware.gpu_memory_bytes * 2 == one.hardware.gpu_memory_bytes, "and a CPU's memory is shared"
    heads = two.model.kv_heads
    with pytest.raises(
        ConfigError, match=rf"has {heads} KV heads, .* among 3; use hardware\.gpus={1 if heads % 2 else 2}"
    ):
        plan_trial(checked(*TWO, "hardware.gpus=3"))


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("cache.disk=1GiB", r"cache\.disk=1GiB"),
        ("model.quantization=int8", r"model\.quantization=int8"),
        ("trial.profile=true", r"trial\.profile=true"),
        ("baseline=llama_cpp", "baseline=llama_cpp"),
    ],
)
def test_what_one_process_does_alone_is_refused_with_several(monkeypatch, override, named):
    monkeypatch.setattr("pensieve.lab.compose.machine.cores", lambda: 2)
    with pytest.raises(ConfigError, match=rf"hardware\.gpus=2 divides .* {named} .*leave one of the two out"):
        plan_trial(checked(*TWO, override))


REPLICAS = ("hardware=replicas", "hardware.device=cpu", "model.weights=random")


@pytest.mark.parametrize(
    ("override", "advice"),
    [("baseline=llama_cpp", "a baseline in the engine"), ("trial.profile=true", "leave trial.profile out")],
)
def test_what_real_replicas_do_not_do_is_refused(override, advice):
    with pytest.raises(ConfigError, match=f"{override}.*use hardware=local, or {advice}"):
        plan_trial(checked(*REPLICAS, override))


def test_who_computes_in_other_processes(monkeypatch):
    monkeypatch.setattr("pensieve.lab.compose.machine.cores", lambda: 2)
    simulated = ("hardware=sim_h100", "hardware.router=affinity", "hardware.replicas=2")
    for overrides, elsewhere in ((TWO, True), (REPLICAS, True), (("hardware=cpu",), False), (simulated, False)):
        assert plan_trial(checked(*overrides)).computes_elsewhere is elsewhere


def test_more_gpus_than_there_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    one = SimpleNamespace(uuid="0", name="a GPU", total_memory=100)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**{**vars(one), "uuid": str(index)})
    )
    with pytest.raises(HardwareMissing, match=r"hardware\.gpus=4: from cuda:1 on this machine has 3 GPU.*gpus=3"):
        find_device(HardwareConfig(name="cuda", simulated=False, device="cuda:1", gpus=4))
    device = find_device(HardwareConfig(name="cuda", simulated=False, device="cuda:1", gpus=3))
    assert (device.names, device.gpu_bytes) == (("cuda:1", "cuda:2", "cuda:3"), 300)
    assert (device.identity, device.others) == ("GPU-1", ("GPU-2", "GPU-3"))
