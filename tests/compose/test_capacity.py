"""cache.gpu=auto: what fits, the same for every baseline, and one sentence with the numbers where nothing does."""

import dataclasses

import pytest

from pensieve.errors import HardwareMissing
from pensieve.lab.compose.build import build_system, check_memory
from pensieve.lab.compose.plan import Device, auto_gpu_blocks, plan_trial, plans_in_flight
from pensieve.serve.systems.engine_system import EngineSystem
from tests.composed import checked

GIB = 2**30
CPU = Device("cpu", "cpu", "cpu", "a CPU", 1, 16 * GIB, 16 * GIB)


def test_simulated_takes_its_share_less_weights_and_an_iteration():
    plan = plan_trial(checked("model=llama3_8b", "cache.gpu=auto", "cache.cpu=20GB", "hardware=sim_a100_80g"))
    taken = plan.gpu_bytes + plan.model.weight_bytes + plan.activation_bytes
    share = 0.9 * 80 * GIB
    assert share - plan.block_bytes < taken <= share
    check_memory(plan)
    half = plan_trial(
        checked("model=llama3_8b", "cache.gpu=auto", "hardware=sim_a100_80g", "hardware.memory_share=0.5")
    )
    assert plan.gpu_bytes - half.gpu_bytes == pytest.approx(0.4 * 80 * GIB, rel=1e-3)
    more = plan_trial(checked("model=llama3_8b", "cache.gpu=auto", "hardware=sim_a100_80g", "hardware.gpus=2"))
    assert more.gpu_bytes > 2 * plan.gpu_bytes, "the weights are there once"


def test_the_started_engine_reports_what_auto_became():
    plan = plan_trial(checked("model=llama3_8b", "cache.gpu=auto", "hardware=sim_h100", "hardware.depth=2"))
    system = build_system(plan)
    assert isinstance(system, EngineSystem)
    system.start()
    assert system.settings()["gpu_tokens"] == plan.gpu_blocks * plan.chunk_tokens
    assert system.settings()["depth"] == 2
    assert system.engine.cache.gpu_blocks == plan.gpu_blocks
    system.close()


def test_a_cpu_takes_half_of_what_is_free_to_a_power_of_two(monkeypatch):
    plan = dataclasses.replace(plan_trial(checked("model.dtype=float32", "cache.gpu=auto")), device=CPU)
    block = plan.block_bytes

    def blocks(free: int) -> int:
        monkeypatch.setattr("pensieve.lab.compose.plan.free_host_memory_bytes", lambda: free)
        return auto_gpu_blocks(plan, GIB)

    assert blocks(8 * GIB) == blocks(8 * GIB - 64 * 2**20), "a little more or less in use changes nothing"
    assert blocks(8 * GIB).bit_count() == 1
    assert 1.2 * GIB < blocks(8 * GIB) * block <= 3 * GIB
    with pytest.raises(HardwareMissing, match=r"cache\.gpu=auto finds no room") as error:
        blocks(2 * GIB)
    for part in ("2.0 GiB on a CPU is 1.0 GiB", "Use a smaller model or cache.cpu"):
        assert part in str(error.value)


def test_a_measured_tier_must_only_be_worth_starting():
    """On a real GPU others may use part of it: the worker measures what is left."""
    plan = plan_trial(checked("model=llama3_8b", "cache.gpu=auto", "hardware=sim_a100_80g"))
    gpu = dataclasses.replace(plan, device=dataclasses.replace(plan.device, kind="cuda"))
    assert gpu.gpu_measured
    assert "about" in gpu.budget()
    check_memory(gpu, 20 * GIB)
    with pytest.raises(HardwareMissing, match=r"10\.0 GiB are free"):
        check_memory(gpu, 10 * GIB)
    with pytest.raises(HardwareMissing):
        check_memory(plan, 20 * GIB)


def test_two_plans_are_in_flight_on_a_gpu_and_one_elsewhere() -> None:
    devices = {kind: dataclasses.replace(CPU, kind=kind) for kind in ("cuda", "cpu", "sim")}
    found = {kind: (plans_in_flight(device, "auto"), plans_in_flight(device, 2)) for kind, device in devices.items()}
    assert found == {"cuda": (2, 2), "cpu": (1, 2), "sim": (1, 2)}
