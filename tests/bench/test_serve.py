import pytest
from hydra import initialize_config_dir

from pensieve.lab.bench import serve
from pensieve.lab.bench.serve import turn_s
from pensieve.lab.compose.conf import conf_folder, read_option
from pensieve.lab.compose.plan import find_device
from pensieve.lab.compose.settings import HardwareConfig
from pensieve.sim.roofline import Roofline
from pensieve.specs import HardwareSpec
from tests.bench.bench import make_bench
from tests.worker.torch.driver import tiny_spec

MACHINE = HardwareSpec("sim", True, flops=1e12, memory_bw=1e9)
CHAT = {"users": 4, "conversations": 4, "think_time_s": 1.0, "min_turns": 2, "max_turns": 3, "max_new_tokens": 16}


@pytest.mark.slow
def test_a_load_puts_every_baseline_beside_the_roofline_ratio(tmp_path, monkeypatch):
    """On a simulated machine, where transformers cannot run: that is said, and the command must not exit with 0."""
    bench = make_bench("serve", tmp_path)
    bench.hardware = HardwareConfig.model_validate(read_option("hardware", "sim_h100"))
    bench.machine = find_device(bench.hardware)
    monkeypatch.setattr(serve, "BASELINES", (serve.OURS, serve.WORST, serve.PEER))
    monkeypatch.setattr(serve, "loads", lambda gpu: [serve.Load("sharegpt", CHAT, "8192 tokens", "8192 tokens")])
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        serve.run(bench)
    (found,) = bench.results["serve"]
    assert [m.backend for m in found.measured] == [*serve.BASELINES]
    ran = {m.backend: m for m in found.measured if m.values}
    assert set(ran) == set(serve.BASELINES[:-1])
    assert "simulated" in str(found.measured[-1].error)
    ratio = ran["pensieve"].figures["roofline_ratio"]
    assert ratio > 1
    assert found.floor == pytest.approx(ratio * ran["stateless"].value)
    assert {"times_stateless", "ttft_ms_p50_turn_1"} < ran["pensieve"].figures.keys()
    jobs = bench.tracking.store.trials_of_sweep(bench.sweep_id)
    assert [job.last.workload for job in jobs] == ["sharegpt"] * 2 + ["bench_serve"] * 3
    assert jobs[0].last.id == ran["pensieve"].engine["trial"]
    (gap,) = bench.gaps
    assert "no peer ran beside it (transformers_cb: " in gap


def test_a_prompt_and_its_decode_steps_add_up() -> None:
    line, turn = Roofline(tiny_spec("llama"), MACHINE, 32), (100, 20, 10)
    step = line.iteration_s([(125, 126)] * 2, 2)
    assert turn_s(line, [turn], 2, keeps=True) == pytest.approx(line.iteration_s([(100, 120)], 1) + 10 * step / 2)
    assert turn_s(line, [turn], 2, keeps=False) == pytest.approx(line.iteration_s([(0, 120)], 1) + 10 * step / 2)
