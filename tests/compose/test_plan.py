import dataclasses
from types import SimpleNamespace

import pytest
import torch

from pensieve.errors import HardwareMissing, WeightsMissing
from pensieve.lab.compose.build import check_memory
from pensieve.lab.compose.plan import Device, find_device, free_device_bytes, model_spec, plan_trial
from pensieve.lab.compose.settings import HardwareConfig
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
    assert f"{plan.budget_gpu_blocks * 32:,} tokens" in plan.budget()


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


def test_a_cpu_holds_both_tiers_and_says_what_to_use_instead():
    plan = plan_trial(checked("model=llama3_8b", "cache=small"))
    machine = Device("cpu", "cpu", "cpu", "this CPU", 1, 24 * 2**30, 24 * 2**30)
    plan = dataclasses.replace(plan, device=machine)
    with pytest.raises(HardwareMissing) as caught:
        check_memory(plan)
    for part in ("the CPU tier 18", "24.0 GiB are there", "hardware=sim_h200", "a smaller cache"):
        assert part in str(caught.value)
    check_memory(plan, free_bytes=2**40)


def test_weights_that_cannot_be_had(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    gqa = checked("model=llama2_13b_gqa", "model.weights=hub").model
    from pensieve.lab.compose.model_files import check_weights

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
    monkeypatch.setattr("pensieve.lab.compose.plan.cores", lambda: 2)
    with pytest.raises(
        HardwareMissing, match=r"hardware\.gpus=8: on the CPU .* 2 cores.*=sim_a100_80g hardware\.gpus=8"
    ):
        find_device(HardwareConfig(name="cpu", simulated=False, device="cpu", gpus=8))
    device = find_device(HardwareConfig(name="cpu", simulated=False, device="cpu", gpus=2))
    assert (device.count, device.names, device.divided) == (2, ("cpu", "cpu"), True)
    assert device.gpu_bytes == find_device(HardwareConfig(name="cpu", simulated=False, device="cpu")).gpu_bytes


TWO = ("hardware=cpu", "hardware.gpus=2", "model.weights=random")


REPLICAS = ("hardware=replicas", "hardware.device=cpu", "model.weights=random")


def test_who_computes_in_other_processes(monkeypatch):
    monkeypatch.setattr("pensieve.lab.compose.plan.cores", lambda: 2)
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
    with pytest.raises(HardwareMissing, match=r"hardware\.gpus=4: from cuda:1 on this machine has 3 GPU.*gpus=4"):
        find_device(HardwareConfig(name="cuda", simulated=False, device="cuda:1", gpus=4))
    device = find_device(HardwareConfig(name="cuda", simulated=False, device="cuda:1", gpus=3))
    assert (device.names, device.gpu_bytes) == (("cuda:1", "cuda:2", "cuda:3"), 300)
    assert (device.identity, device.others) == ("GPU-1", ("GPU-2", "GPU-3"))


def test_what_this_process_holds_of_a_gpu_counts_as_free(monkeypatch):
    """A bench keeps its model from trial to trial: it must not be refused for the memory that its own model takes."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda name: (7 * 2**30, 24 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda name: {"cuda:1": 16 * 2**30}[name])
    device = Device("cuda", "cuda:1", "GPU-1", "a GPU", 1, 24 * 2**30, 2**36)
    assert free_device_bytes(device) == 23 * 2**30
