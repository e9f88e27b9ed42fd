"""From a plan to replicas that are not started: what each of them gets, and what is refused before any starts."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from pensieve.errors import ConfigError, HardwareMissing
from pensieve.lab.compose.build import _asked_model
from pensieve.lab.compose.plan import find_device, memory_limit_bytes, plan_trial
from pensieve.lab.compose.settings import check
from pensieve.plugins.replicas import system as build_module
from pensieve.plugins.replicas.system import build_replicas
from tests.composed import checked

REAL = ("hardware=replicas", "hardware.device=cpu", "model.weights=random")


def test_each_replica_gets_the_configuration_of_one_engine_and_its_share_of_the_cores():
    config = checked(*REAL, "hardware.replicas=2", "hardware.router=random", "eviction=lru")
    plan = plan_trial(config)
    one = check(build_replicas(plan, 2, "random").fields)
    assert (one.hardware.replicas, one.hardware.router) == (1, "single")
    threads = one.hardware.threads
    assert threads is not None and 1 <= threads <= max(1, build_module.physical_cores() // 2)
    for group in ("model", "cache", "eviction", "scheduler", "baseline", "seed", "attention_backend"):
        assert getattr(one, group) == getattr(config, group)
    given, got = config.hardware.model_dump(), one.hardware.model_dump()
    assert {name for name in given if got[name] != given[name]} == {"threads", "replicas", "router"}
    given = plan_trial(checked(*REAL, "hardware.threads=3"))
    assert build_replicas(given, 4, "affinity").fields["hardware"]["threads"] == 3


def test_replicas_share_the_memory_and_those_that_do_not_fit_together_are_refused_before_any_starts(monkeypatch):
    """By its share a replica packs its weights, or does not."""
    plan = plan_trial(checked(*REAL, "hardware.cpu_memory=8GiB"))
    given = [check(build_replicas(plan, most, "affinity").fields) for most in (1, 2, 4)]
    assert [memory_limit_bytes(one.hardware) for one in given] == [8 * 2**30, 4 * 2**30, 2 * 2**30]
    beside = [_asked_model(plan_trial(one)).memory_bytes for one in given]
    assert beside == [8 * 2**30 // most - plan.gpu_bytes - plan.cpu_bytes for most in (1, 2, 4)]
    plan = plan_trial(checked(*REAL))
    assert build_replicas(plan, 2, "affinity").fields["hardware"]["cpu_memory"] is None
    need = plan.model.weight_bytes + plan.gpu_bytes + plan.cpu_bytes + plan.activation_bytes
    monkeypatch.setattr(build_module, "free_device_bytes", lambda _: 3 * need)
    build_replicas(plan, 3, "affinity")
    with pytest.raises(HardwareMissing, match=r"Of 4 replicas.*are free"):
        build_replicas(plan, 4, "affinity")


def gpus(monkeypatch, count):
    """A machine with so many, as torch tells of it."""

    def properties(index):
        return SimpleNamespace(uuid=f"uuid-{index}", name="H100", total_memory=80 * 2**30)

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.setattr("torch.cuda.get_device_properties", properties)


@pytest.mark.parametrize(("replicas", "gpus_each", "taken"), [(1, 1, 1), (2, 1, 2), (2, 2, 4), (3, 2, 4)])
def test_every_gpu_of_the_replicas_is_locked(replicas, gpus_each, taken, monkeypatch):
    gpus(monkeypatch, 4)
    count = (f"hardware.replicas={replicas}", f"hardware.gpus={gpus_each}")
    device = find_device(checked("hardware=replicas", "hardware.device=cuda", *count).hardware)
    assert [device.identity, *device.others] == [f"GPU-uuid-{number}" for number in range(taken)]
    assert device.count == gpus_each and device.gpu_bytes == gpus_each * 80 * 2**30, "a replica's"


def test_a_gpu_by_its_number_is_refused_for_replicas(monkeypatch):
    """Each replica sees its own GPUs only, from 0 on."""
    plan = plan_trial(checked(*REAL))
    config = checked("hardware=replicas", "hardware.device=cuda:1", "model.weights=random")
    on_gpu = replace(plan, config=config, device=replace(plan.device, kind="cuda", name="cuda:1"))
    with pytest.raises(ConfigError, match=r"hardware\.device=cuda:1 .*use hardware\.device=cuda\.$"):
        build_replicas(on_gpu, 2, "affinity")
