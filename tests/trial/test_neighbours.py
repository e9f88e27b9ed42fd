"""Others' share of the CPUs, from counters that are written down."""

import os
from collections import namedtuple
from types import SimpleNamespace

import psutil
import pytest

from pensieve.lab.trial import samples
from pensieve.lab.trial.samples import Neighbours

Times = namedtuple("Times", "user nice system idle iowait irq softirq steal guest guest_nice")
Own = namedtuple("Own", "user system children_user children_system")


@pytest.fixture
def machine(monkeypatch):
    """Two cores; what a test writes into it is what psutil and the clock say."""
    now = SimpleNamespace(s=0.0, times=Times(*[0.0] * 10), own=Own(0.0, 0.0, 0.0, 0.0), engine=None)
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2)
    monkeypatch.setattr(psutil, "cpu_times", lambda: now.times)
    monkeypatch.setattr(psutil.Process, "cpu_times", lambda self: now.own if self.pid == os.getpid() else now.engine)
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [psutil.Process(1)] if now.engine else [])
    monkeypatch.setattr(samples.time, "monotonic", lambda: now.s)
    return now


@pytest.mark.parametrize(
    ("times", "own", "share"),
    [
        (Times(8, 0, 2, 10, 0, 0, 0, 0, 0, 0), Own(8, 2, 0, 0), 0.0),  # all of it was ours
        (Times(8, 0, 2, 10, 0, 0, 0, 0, 0, 0), Own(3, 1, 1, 0), 0.25),  # children are ours
        (Times(0, 0, 0, 0, 20, 0, 0, 0, 0, 0), Own(0, 0, 0, 0), 0.0),  # waiting for a disk is no work
        (Times(5, 0, 0, 5, 0, 0, 0, 10, 0, 0), Own(5, 0, 0, 0), 0.5),  # stolen by another machine
        (Times(10, 0, 0, 0, 0, 0, 0, 0, 10, 0), Own(0, 0, 0, 0), 0.5),  # a guest is not counted twice
        (Times(4, 0, 0, 0, 0, 0, 0, 0, 0, 0), Own(4.1, 0, 0, 0), 0.0),  # counters tick apart: never below nothing
    ],
)
def test_the_share_is_what_others_worked_of_all_that_could_be(machine, times, own, share):
    watch = Neighbours()
    machine.s, machine.times, machine.own = 10.0, times, own
    assert watch.share() == pytest.approx(share)
