from __future__ import annotations

import pytest
from hydra import initialize_config_dir

from pensieve.lab.bench import serve
from pensieve.lab.compose import conf_folder, read_option
from pensieve.lab.compose.machine import find_device
from pensieve.lab.compose.schema import HardwareConfig
from tests.bench.bench import make_bench

CHAT = {"think_time_s": 1.0, "min_turns": 2, "max_turns": 3, "max_new_tokens": 16, "warmup_turns": 1}


@pytest.mark.slow
def test_a_cell_puts_every_baseline_beside_the_roofline_ratio(tmp_path, monkeypatch):
    """On a simulated machine, where transformers cannot run: that is said, and the command must not exit with 0."""
    bench = make_bench("serve", tmp_path)
    bench.hardware = HardwareConfig.model_validate(read_option("hardware", "sim_h100"))
    bench.machine = find_device(bench.hardware)
    cell = serve.Cell("sharegpt", CHAT, "users", (2, 8), "8192 tokens", "8192 tokens", 1.0)
    monkeypatch.setattr(serve, "cells", lambda gpu, full: [cell])
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        serve.run(bench)
    (result,) = bench.results["serve"]
    assert [m.backend for m in result.measured] == [*serve.BASELINES, serve.PEER]
    ran = {m.backend: m for m in result.measured if m.values}
    assert set(ran) == set(serve.BASELINES)
    assert "simulated" in str(result.measured[-1].error)
    ratio = ran["pensieve"].figures["roofline_ratio"]
    assert ratio > 1
    assert result.case.floor == pytest.approx(ratio * ran["stateless"].value)
    assert [point["load"] for point in ran["pensieve"].engine["curve"]] == [2, 8]
    jobs = bench.tracking.store.trials_of_sweep(bench.sweep_id)
    assert [job.job for job in jobs] == list(range(2 * 5 + 6))
    assert {job.last.workload for job in jobs} == {"sharegpt", "bench_serve"}
    assert jobs[0].last.id == ran["pensieve"].engine["curve"][0]["trial_id"]
    (gap,) = bench.gaps
    assert "no peer ran beside it (transformers_cb: " in gap
