from __future__ import annotations

from pathlib import Path

import pytest
from hydra import initialize_config_dir

from pensieve.lab.bench import serve
from pensieve.lab.bench.models import plain_module
from pensieve.lab.bench.peers import TransformersSystem
from pensieve.lab.compose import conf_folder, read_option
from pensieve.lab.compose.machine import find_device
from pensieve.lab.compose.schema import HardwareConfig
from pensieve.lab.replay import replay
from pensieve.lab.workload.base import WorkloadContext
from pensieve.lab.workload.chat import ChatWorkload
from tests.bench.bench import make_bench
from tests.worker.torch.driver import tiny_model

CHAT = {"think_time_s": 1.0, "min_turns": 2, "max_turns": 3, "max_new_tokens": 16, "warmup_turns": 1}


@pytest.mark.slow
def test_a_cell_puts_every_baseline_beside_the_roofline_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a simulated machine, where transformers cannot run: that is said, and the command must not exit with 0."""
    bench = make_bench("serve", tmp_path)
    bench.hardware = HardwareConfig.model_validate(read_option("hardware", "sim_h100"))
    bench.machine = find_device(bench.hardware)
    cell = serve.Cell("sharegpt", CHAT, "users", (2, 8), "8192 tokens", "8192 tokens", 1.0)
    monkeypatch.setattr(serve, "cells", lambda gpu, full: [cell])
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        serve.run(bench)
    (result,) = bench.results
    assert [m.backend for m in result.measured] == [*serve.BASELINES, serve.PEER]
    ran = {m.backend: m for m in result.measured if m.values}
    assert set(ran) == set(serve.BASELINES)
    assert "simulated" in str(result.measured[-1].error)
    ratio = next(f.value for f in ran["pensieve"].figures if f.name == "roofline_ratio")
    assert ratio is not None and ratio > 1
    assert result.case.floor == pytest.approx(ratio * ran["stateless"].value)
    assert [point["load"] for point in ran["pensieve"].engine["curve"]] == [2, 8]
    jobs = bench.tracking.store.trials_of_sweep(bench.records.sweep_id)
    assert [job.job for job in jobs] == list(range(2 * 5 + 6))
    assert {job.last.workload for job in jobs} == {"sharegpt", "bench_serve"}
    assert jobs[0].last.id == ran["pensieve"].engine["curve"][0]["trial_id"]
    assert "Think time 1 s" in bench.sentences[0]
    (gap,) = bench.gaps
    assert "transformers_cb did not run beside it" in gap


def test_transformers_answers_the_same_requests_as_a_system() -> None:
    model = tiny_model("llama")
    context = WorkloadContext(0, 512, 0, 512, 97, lambda text: [3 + byte % 90 for byte in text.encode()], True)
    workload = ChatWorkload(context, users=2, min_turns=2, max_turns=2, max_new_tokens=5, think_time_s=0.0, pressure=0)
    system = TransformersSystem(plain_module(model), kv_tokens=1024, batch_tokens=128, requests=4)
    try:
        started = system.start()
        record = replay(system, workload)
    finally:
        system.close()
    assert started.settings["engine"] == "transformers continuous batching"
    assert record.turns
    for turn in record.turns:
        assert turn.status == "completed" and turn.output_tokens == len(turn.emitted_s) > 0
        assert turn.ttft_ms is not None and 0 < turn.ttft_ms <= turn.latency_ms  # type: ignore[operator]
    later = [turn for turn in record.turns if turn.turn == 2]
    earlier = {turn.session: turn for turn in record.turns if turn.turn == 1}
    for turn in later:
        before = earlier[turn.session]
        assert turn.prompt_tokens > before.prompt_tokens + before.output_tokens  # type: ignore[operator]
