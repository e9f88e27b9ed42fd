"""The Chrome trace of a simulated run: what it shows is what happened."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest

from pensieve.errors import ConfigError
from pensieve.lab.compose import check
from pensieve.sim.timeline import Timeline
from pensieve.sim.worker import SimulatedWorker
from tests.composed import composed
from tests.simulated import make_engine, request, run


@pytest.mark.parametrize("windows", [False, True])
def test_every_iteration_copy_and_request_is_drawn_at_its_time(tmp_path: Path, windows: bool) -> None:
    engine = make_engine(gpu_blocks=16, cpu_blocks=32, chunk_tokens=4, computes=not windows)
    worker = engine.worker
    assert isinstance(worker, SimulatedWorker)
    worker.timeline = Timeline()
    turns = []
    for number, (session, turn) in enumerate([("a", 1), ("b", 1), ("c", 1), ("a", 2)]):
        engine.say(request(number, session, 20, 8, turn))
        turns += run(engine).values()
    worker.timeline.write(tmp_path / "trace.json.gz", turns, 0.0)
    with gzip.open(tmp_path / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    timed = [event["ts"] for event in events if event["ph"] != "M"]
    assert timed == sorted(timed) and events[: len(events) - len(timed)] == [e for e in events if e["ph"] == "M"]
    lanes = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    drawn = {name: [e for e in events if e["ph"] == "X" and e["tid"] == lane] for name, lane in lanes.items()}
    assert len(drawn["compute"]) == 4 * 8, "each request alone: a prefill that gives the first token, and seven decodes"
    assert sum(event["args"]["positions"] for event in drawn["compute"]) == engine.scheduler.counters.batched_tokens
    stalled = sum(event["dur"] for event in drawn["compute"]) - engine.facts.counts.compute_ns / 1e3
    assert stalled == pytest.approx(engine.facts.counts.stall_ns / 1e3)
    for lane in drawn.values():  # nothing on a lane overlaps
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(lane))
    counters = engine.cache.counters
    assert sum(event["args"]["blocks"] for event in drawn["GPU to CPU"]) == counters.swapped_out_blocks > 0
    assert sum(event["args"]["blocks"] for event in drawn["CPU to GPU"]) == counters.swapped_in_blocks > 0
    decodes = {e["id"]: e for e in events if e["ph"] == "e" and e["name"] == "decode"}
    assert {number: event["ts"] for number, event in decodes.items()} == {
        turn.request_id: pytest.approx(1e6 * (turn.finished_s or 0.0)) for turn in turns
    }


def test_a_real_machine_is_profiled_and_not_drawn() -> None:
    with pytest.raises(ConfigError, match=r"trial\.profile=true"):
        check(composed("hardware=cpu", "trial.trace=true"))


@pytest.mark.parametrize("several", [("hardware.router=affinity", "hardware.replicas=2"), ("baseline=fully_aware",)])
def test_what_cannot_be_drawn_is_refused_and_not_left_out(several: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"trial\.trace=true draws"):
        check(composed("hardware=sim_h100", "model=llama3_8b", "trial.trace=true", *several))
