import tempfile
import threading

import pytest
from filelock import FileLock, Timeout

from pensieve.lab.compose.plan import Device
from pensieve.lab.trial.job import device_lock, lock_files

CPU = Device("cpu", "cpu", "cpu", "this CPU", 1, 1, 1)
SIMULATED = Device("sim", "sim", "sim", "sim_h100", 1, 1, 1)


@pytest.fixture(autouse=True)
def own_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_the_second_waits_and_says_so(monkeypatch):
    said, order = [], []

    def second():
        with device_lock(CPU, True):
            order.append("second")

    waiting = threading.Event()
    monkeypatch.setattr("pensieve.lab.trial.job.say", lambda text: (said.append(text), waiting.set()))
    with device_lock(CPU, True):
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(10)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]
    assert said == ["Waiting for this CPU: another trial runs on it (trial.exclusive=false would run beside it)."]


@pytest.mark.parametrize(("device", "exclusive"), [(CPU, False), (SIMULATED, True)])
def test_no_lock_where_none_is_due(device, exclusive):
    with device_lock(device, exclusive):
        assert not any(path.exists() for path in lock_files(device))


def test_the_gpus_of_a_divided_model_are_all_locked_in_one_order():
    two = Device("cuda", "cuda:0", "GPU-b", "H100", 2, 1, 1, others=("GPU-a",))
    assert [path.name for path in lock_files(two)] == ["pensieve-GPU-a.lock", "pensieve-GPU-b.lock"]
    with device_lock(two, True):
        for one in ("GPU-a", "GPU-b"):
            with pytest.raises(Timeout):
                FileLock(lock_files(Device("cuda", "cuda:0", one, "H100", 1, 1, 1))[0]).acquire(timeout=0)
    for path in lock_files(two):
        FileLock(path).acquire(timeout=0).lock.release()
