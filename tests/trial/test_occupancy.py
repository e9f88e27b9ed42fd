import time
from itertools import pairwise

import pytest

from pensieve.core.clock import VirtualClock, WallClock
from pensieve.errors import ResultsError
from pensieve.lab.results.store import open_store
from pensieve.lab.trial.samples import MOST_MOMENTS, Sampler, gauges_of
from tests.results.trials import trial_fields
from tests.trial.test_run import run, tracking  # noqa: F401  a fixture

NAMES = {"gpu_blocks_used", "cpu_blocks_used", "queue_length", "running_requests"}


class Gauged:
    """Holds as many blocks as the last time that somebody set."""

    def __init__(self, clock):
        self.clock, self.held, self.asked = clock, 0, 0

    def gauges(self):
        self.asked += 1
        return {"gpu_blocks_used": (self.held, "blocks")}


class Silent:
    clock = VirtualClock()


@pytest.fixture
def store(tmp_path):
    opened = open_store(tmp_path)
    opened.begin_trial(trial_fields())
    return opened


def test_simulated_time_is_read_at_even_moments(store):
    clock = VirtualClock()
    clock.advance_to(5_000_000_000)  # the engine was started before
    system = Gauged(clock)
    with Sampler(store, 1, gauges_of(system), clock, 0.1):
        for held, until_ms in ((3, 5_250), (7, 5_260), (9, 5_460)):
            system.held = held
            clock.advance_to(until_ms * 1_000_000)
    clock.advance_to(9_000_000_000)
    readings = store.samples_of(1)
    assert [(round(r.at_s, 9), r.value) for r in readings] == [(0.0, 3), (0.1, 3), (0.2, 3), (0.3, 9), (0.4, 9)]
    assert {(r.device, r.name, r.unit) for r in readings} == {("engine", "gpu_blocks_used", "blocks")}
    assert system.asked == 2  # once for each stretch in which a reading fell due


@pytest.mark.parametrize("steps", [1, 100, 100_000])
def test_a_trial_of_any_length_has_a_bounded_number_of_readings(store, steps):
    clock = VirtualClock()
    with Sampler(store, 1, gauges_of(Gauged(clock)), clock, 0.1, most=64):
        for step in range(steps):
            clock.advance_to((step + 1) * 100_000 * 1_000_000_000 // steps)  # a day and a bit
    times = [r.at_s for r in store.samples_of(1)]
    assert 32 <= len(times) < 64
    gaps = {round(b - a, 6) for a, b in pairwise(times)}
    assert len(gaps) == 1  # evenly, however the clock moves
    assert times[-1] >= 100_000 - 2 * max(gaps)


def test_a_wall_clock_is_read_by_a_thread(store):
    system = Gauged(WallClock())
    with Sampler(store, 1, gauges_of(system), system.clock, 0.01):
        ends = time.monotonic() + 60
        while system.asked < 5 and time.monotonic() < ends:
            time.sleep(0.01)
    asked = system.asked
    times = [r.at_s for r in store.samples_of(1)]
    assert len(times) == asked >= 5
    assert all(b > a for a, b in pairwise(times))
    time.sleep(0.05)
    assert system.asked == asked


def test_a_system_that_does_not_tell_and_a_full_disk(store, monkeypatch, caplog):
    with Sampler(store, 1, gauges_of(Silent()), Silent.clock):
        Silent.clock.advance_to(10**10)
    assert store.samples_of(1) == []

    def full(*_):
        raise ResultsError("the disk is full")

    monkeypatch.setattr(type(store), "add_samples", full)
    with Sampler(store, 1, gauges_of(Gauged(VirtualClock())), VirtualClock()):
        pass
    assert "not kept: the disk is full" in caplog.text


@pytest.mark.parametrize("baseline", ["pensieve", "stateless", "prefix_cache", "llama_slots"])
def test_a_trial_shows_what_it_held(tracking, baseline):  # noqa: F811
    outcome = run(tracking, f"baseline={baseline}", "workload.pressure=2")
    trial = tracking.store.trial(outcome.trial_id)
    readings = tracking.store.samples_of(outcome.trial_id)
    assert {r.name for r in readings} == NAMES
    assert 0 < len(readings) <= MOST_MOMENTS * len(NAMES)
    most = {name: max(r.value for r in readings if r.name == name) for name in NAMES}
    chunk = trial.config["cache"]["chunk_tokens"]
    assert 0 < most["gpu_blocks_used"] <= trial.gpu_tokens / chunk
    assert most["running_requests"] >= 1
    assert (most["cpu_blocks_used"] > 0) is (baseline == "pensieve")
    assert most["cpu_blocks_used"] <= trial.cpu_tokens / chunk
    assert min(r.at_s for r in readings) == 0.0
    assert max(r.at_s for r in readings) <= trial.measure_end_s + 100
