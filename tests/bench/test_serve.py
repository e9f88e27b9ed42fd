from __future__ import annotations

import pytest
from hydra import initialize_config_dir

from pensieve.lab.bench import serve
from pensieve.lab.bench.serve import MARGIN, Point, Reached, Turn, at_latency, common_latency, turn_s
from pensieve.lab.compose.conf import conf_folder, read_option
from pensieve.lab.compose.plan import find_device
from pensieve.lab.compose.settings import HardwareConfig
from pensieve.sim.roofline import Roofline
from pensieve.specs import HardwareSpec
from tests.bench.bench import make_bench
from tests.worker.torch.driver import tiny_spec

MACHINE = HardwareSpec("sim", True, flops=1e12, memory_bw=1e9)
SLOW = [Point(1, 10.0, 8.0), Point(2, 15.0, 20.0)]
FAST = [Point(1, 11.0, 4.0), Point(2, 20.0, 6.0)]
CHAT = {"think_time_s": 1.0, "min_turns": 2, "max_turns": 3, "max_new_tokens": 16, "warmup_turns": 1}


@pytest.mark.slow
def test_a_cell_puts_every_baseline_beside_the_roofline_ratio(tmp_path, monkeypatch):
    """On a simulated machine, where transformers cannot run: that is said, and the command must not exit with 0."""
    bench = make_bench("serve", tmp_path)
    bench.hardware = HardwareConfig.model_validate(read_option("hardware", "sim_h100"))
    bench.machine = find_device(bench.hardware)
    cell = serve.Cell("sharegpt", CHAT, "users", (2, 8), "8192 tokens", "8192 tokens", 1.0)
    monkeypatch.setattr(serve, "cells", lambda gpu: [cell])
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        serve.run(bench)
    (found,) = bench.results["serve"]
    assert [m.backend for m in found.measured] == [*serve.BASELINES, serve.PEER]
    ran = {m.backend: m for m in found.measured if m.values}
    assert set(ran) == set(serve.BASELINES)
    assert "simulated" in str(found.measured[-1].error)
    ratio = ran["pensieve"].figures["roofline_ratio"]
    assert ratio > 1
    assert found.floor == pytest.approx(ratio * ran["stateless"].value)
    assert [point["load"] for point in ran["pensieve"].engine["curve"]] == [2, 8]
    jobs = bench.tracking.store.trials_of_sweep(bench.sweep_id)
    assert [job.job for job in jobs] == list(range(2 * 4 + 5))
    assert {job.last.workload for job in jobs} == {"sharegpt", "bench_serve"}
    assert jobs[0].last.id == ran["pensieve"].engine["curve"][0]["trial_id"]
    (gap,) = bench.gaps
    assert "no peer ran beside it (transformers_cb: " in gap


@pytest.mark.parametrize(
    ("points", "latency", "reached"),
    [
        (SLOW, 14.0, Reached(12.5, "")),
        (SLOW, 8.0, Reached(10.0, "")),
        (FAST, 10.0, Reached(20.0, ">=")),
        (SLOW, 7.0, Reached(10.0, "<=")),
    ],
)
def test_between_two_loads_it_is_linear_and_beyond_them_only_bounded(points, latency, reached):
    assert at_latency(points, latency) == reached
    assert common_latency({"slow": SLOW, "fast": FAST}) == MARGIN * 8.0, "one that every system keeps to"


def test_a_prompt_and_its_decode_steps_add_up() -> None:
    line, turn = Roofline(tiny_spec("llama"), MACHINE, 32), Turn(100, 20, 10)
    step = line.iteration_s([(125, 126)] * 2, 2)
    assert turn_s(line, [turn], 2, keeps=True) == pytest.approx(line.iteration_s([(100, 120)], 1) + 10 * step / 2)
    assert turn_s(line, [turn], 2, keeps=False) == pytest.approx(line.iteration_s([(0, 120)], 1) + 10 * step / 2)
