"""An engine's process: what is said when it does not start, that it never outlives its trial, and what memory it may have."""

import mmap
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from pensieve.errors import EngineFailed
from pensieve.plugins.engines import process
from pensieve.plugins.engines.process import EngineProcess, MemoryWatch, resident_bytes, this_process, with_children
from tests.waiting import until


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def shell(script: str) -> EngineProcess:
    return EngineProcess("engine", ["/bin/sh", "-c", script])


def pid_in(file: Path) -> int:
    assert until(lambda: file.is_file() and file.read_text().strip() != "")
    return int(file.read_text())


def test_a_start_that_fails_or_takes_too_long_shows_the_last_lines_of_the_log_and_is_ended(tmp_path: Path) -> None:
    engine = shell("for i in $(seq 40); do echo line $i; done; echo no such model >&2; exit 3")
    with pytest.raises(EngineFailed) as caught:
        engine.wait_until(lambda: False, 30)
    said = str(caught.value)
    assert "engine ended with status 3 before it was ready" in said
    assert "no such model" in said and "line 40" in said
    assert "line 20\n" not in said, "the last lines, not all of them"
    file = tmp_path / "pid"
    engine = shell(f"echo $$ > {file}; echo still loading; exec sleep 100")
    pid = pid_in(file)
    with pytest.raises(EngineFailed, match=r"(?s)not ready after 0\.1 s.*still loading"):
        engine.wait_until(lambda: False, 0.1)
    assert until(lambda: gone(pid))


def test_close_ends_grandchildren_also_those_that_left_the_session(tmp_path: Path) -> None:
    """And nobody was told that the engine runs."""
    child, stray = tmp_path / "child", tmp_path / "stray"
    engine = shell(f"env; echo $$ > {child}; setsid sh -c 'echo $$ > {stray}; exec sleep 100' & wait")
    pids = [pid_in(child), pid_in(stray)]
    assert not any(map(gone, pids))
    assert all(f"{name}={value}" in engine.log() for name, value in process.QUIET.items())
    engine.close()
    engine.close()
    assert all(until(lambda pid=pid: gone(pid)) for pid in pids)
    assert engine.log() == ""


def test_a_command_that_ignores_the_request_to_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Path(process.__file__).with_name("guard.py").read_text()
    (tmp_path / "guard.py").write_text(guard.replace("GRACE_S = 5.0", "GRACE_S = 0.2"))
    monkeypatch.setattr(process, "__file__", str(tmp_path / "process.py"))
    file = tmp_path / "pid"
    engine = shell(f"trap '' TERM; echo $$ > {file}; while true; do sleep 0.1; done")
    pid = pid_in(file)
    engine.close()
    assert until(lambda: gone(pid))


def test_the_engine_dies_with_its_trial_and_with_its_guard_also_after_kill_9(tmp_path: Path) -> None:
    """And no log is left in the temporary folder: not its own, nor that of one that had ended by itself before."""
    file, told, temporary = tmp_path / "pid", tmp_path / "told", tmp_path / "temporary"
    temporary.mkdir()
    parent = textwrap.dedent(
        f"""
        import pathlib, time
        from pensieve.plugins.engines.process import EngineProcess
        ended = EngineProcess("engine", ["/bin/sh", "-c", "echo no such model; exit 3"])
        ended.wait(60)
        engine = EngineProcess("engine", ["/bin/sh", "-c", "echo $$ > {file}; exec sleep 100"])
        pathlib.Path("{told}").write_text(ended.last_lines())
        time.sleep(100)
        """
    )
    trial = subprocess.Popen([sys.executable, "-c", parent], env={**os.environ, "TMPDIR": str(temporary)})
    pid = pid_in(file)
    assert until(lambda: told.is_file() and told.read_text() != "")
    assert told.read_text() == "no such model"
    os.kill(trial.pid, signal.SIGKILL)
    trial.wait()
    assert until(lambda: gone(pid))
    assert list(temporary.iterdir()) == []
    file.unlink()
    engine = shell(f"echo $$ > {file}; exec sleep 100")
    pid = pid_in(file)
    os.kill(engine.pid, signal.SIGKILL)
    assert until(lambda: gone(pid))
    engine.close()


# -- memory -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "kills", "killed"), [(100, True, {3}), (130, True, set()), (100, False, set())])
def test_the_newest_is_killed_and_only_as_many_as_it_takes(
    limit: int, kills: bool, killed: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes 1, 2, 3 were started in that order; a killed one holds nothing from then on."""
    held, ended = {1: 40, 2: 40, 3: 50}, list[int]()
    monkeypatch.setattr(process, "resident_bytes", held.__getitem__)
    monkeypatch.setattr(psutil, "Process", lambda pid: type("One", (), {"kill": lambda _: ended.append(pid)})())
    watch = MemoryWatch(limit, lambda: list(held), kills)
    for _ in range(2):
        watch.look()
    assert set(ended) == watch.killed == killed
    assert watch.peak_bytes == 130 and watch.exceeded == (limit < 130)


def test_a_watch_reads_while_the_block_runs_what_is_touched_and_not_what_is_promised() -> None:
    size, before = 64 * 2**20, resident_bytes(os.getpid())
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as promised:
        assert resident_bytes(os.getpid()) - before < size / 2
        for page in range(0, size, mmap.PAGESIZE):
            promised[page] = 1
        assert resident_bytes(os.getpid()) - before > 0.9 * size
    assert resident_bytes(2**22 + 1) == 0, "a process that is gone"
    with MemoryWatch(1, this_process) as watch, subprocess.Popen(["sleep", "60"]) as child:
        try:
            assert {os.getpid(), child.pid} <= set(with_children())
            assert until(lambda: watch.peak_bytes > 0) and watch.exceeded
        finally:
            child.kill()
