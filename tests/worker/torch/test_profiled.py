import gzip
import json

from pensieve.core.machine import WallClock
from pensieve.core.plan import Row, Sample, StepPlan
from pensieve.device.worker import TorchWorker
from pensieve.plugins.device.profiled import ProfiledWorker
from tests.worker.torch.driver import tiny_model


def run_steps(worker, first, count):
    worker.launch(StepPlan(first, (Row(0, ((0, 8),), tuple(range(8)), Sample(8)),), tables=((0, 0, (0, 1)),)))
    assert worker.collect(None).error is None
    for step in range(first + 1, first + count):
        at = 7 + step - first
        worker.launch(StepPlan(step, (Row(0, ((at, at + 1),), None, Sample(at + 1)),)))
        assert worker.collect(None).error is None


def traced(path):
    with gzip.open(path) as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    return [name for name in names if name.startswith("launch step")], names


def test_the_trace_holds_the_steps_after_the_first_and_no_more_than_asked(tmp_path):
    worker = ProfiledWorker(TorchWorker(tiny_model("llama"), 32, WallClock()), tmp_path / "t" / "trace.json.gz", 2, 3)
    report = worker.start(4, 0)
    assert report.settings["profiled_steps"] == [2, 5]
    assert worker.tensors.gpu_blocks == 4  # what the protocol does not name is the worker's own
    run_steps(worker, 0, 9)
    steps, names = traced(worker.path)
    assert [name.split(":")[0] for name in steps] == ["launch step 2", "launch step 3", "launch step 4"]
    assert any("aten::" in name for name in names)
    written = worker.path.stat().st_mtime_ns
    worker.close()
    assert worker.path.stat().st_mtime_ns == written


def test_a_short_trial_is_traced_to_its_end_and_measuring_steps_do_not_count(tmp_path):
    worker = ProfiledWorker(TorchWorker(tiny_model("llama"), 32, WallClock()), tmp_path / "trace.json.gz", 1, 100)
    worker.start(4, 0)
    for _ in range(3):
        worker.launch(StepPlan(-1, (Row(0, ((0, 8),), tuple(range(8)), Sample(8)),), tables=((0, 0, (0, 1)),)))
        worker.collect(None)
    run_steps(worker, 0, 3)
    worker.close()
    steps, _ = traced(worker.path)
    assert [name.split(":")[0] for name in steps] == ["launch step 1", "launch step 2"]
