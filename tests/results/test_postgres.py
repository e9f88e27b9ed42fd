"""The results database on a real PostgreSQL, where its programs are installed."""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest
from sqlalchemy import inspect, text

from pensieve.lab.results.store import Reading, ResultsStore, open_store
from tests.composed import SHORT, composed
from tests.results.test_database import CONTRACT, in_another_process
from tests.results.trials import add_trial, conversation_turns, open_sweep, trial_fields

PASSWORD = "a-secret-word"


def programs():
    """The folder of initdb and pg_ctl; None where there is none."""
    asked = shutil.which("pg_config")
    folders = (
        [Path(subprocess.run([asked, "--bindir"], capture_output=True, text=True, check=True).stdout.strip())]
        if asked
        else []
    )
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").is_file()), None)


def _as_postgres():
    """initdb refuses to run as root."""
    if os.getuid() != 0:
        return {}
    user = pwd.getpwnam("postgres")
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


@pytest.fixture(scope="module")
def server():
    """host:port of a server of our own, in a temporary folder."""
    pytest.importorskip("psycopg", reason="the driver psycopg is not installed")
    folder = programs()
    if folder is None:
        pytest.skip("PostgreSQL's programs are not installed")
    try:
        who = _as_postgres()
    except KeyError:
        pytest.skip("there is no user postgres to run PostgreSQL as, and it refuses to run as root")
    with tempfile.TemporaryDirectory() as name, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        data, secret = Path(name) / "data", Path(name) / "secret"
        secret.write_text(PASSWORD)
        if who:
            for path in (Path(name), secret):
                os.chown(path, who["user"], who["group"])
        quiet = {"check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": "/", **who}
        how = ["-U", "pensieve", "-A", "scram-sha-256", f"--pwfile={secret}", "--no-sync", "-E", "UTF8"]
        make = [folder / "initdb", "-D", data, *how]
        subprocess.run(make, **quiet)
        options = f"-c listen_addresses=127.0.0.1 -p {port} -k {name} -c fsync=off"
        control = [folder / "pg_ctl", "-D", data, "-w"]
        subprocess.run([*control, "-l", f"{name}/log", "-o", options, "start"], **quiet)
        try:
            yield f"127.0.0.1:{port}"
        finally:
            subprocess.run([*control, "-m", "immediate", "stop"], **quiet)


@pytest.fixture
def url(server, request):
    """An empty database for each test."""
    import psycopg

    name = request.node.name[:60]
    with psycopg.connect(f"postgresql://pensieve:{PASSWORD}@{server}/postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return f"postgresql+psycopg://pensieve:{PASSWORD}@{server}/{name}"


def test_the_schema_and_a_trial(url, tmp_path):
    store = open_store(tmp_path, url)
    with store.database.reading() as connection:
        inspector = inspect(connection)
        assert {
            t: " ".join(c["name"] for c in inspector.get_columns(t)) for t in inspector.get_table_names()
        } == CONTRACT
    sweep = open_sweep(store, 1, seed="0")
    turns = conversation_turns([10.0, 11.0])
    trial = add_trial(store, sweep, 0, "pensieve", turns, tokens=tmp_path)
    store.add_samples(trial, [Reading(0.5, "gpu0", "power_w", 3.0, "W")])
    assert [t.ttft_ms for t in store.turns_of(trial)] == [t.ttft_ms for t in turns]
    (job,) = store.trials_of_sweep(sweep)
    assert (job.trial.id, job.value("gpu_hit_rate")) == (trial, 0.5)
    assert job.trial.started_at.utcoffset().total_seconds() == 0
    assert store.artifacts_of(trial, "tokens")[0].path.is_file()
    store.begin_trial(trial_fields())
    sentence = in_another_process(lambda: ResultsStore(url).begin_trial(trial_fields()))
    assert "running already" in sentence
    assert not list(tmp_path.glob("results.db*"))


@pytest.mark.slow
def test_tracking_postgres_and_no_password_in_any_record(url, tmp_path, monkeypatch):
    from pensieve.lab.compose.settings import check, resolved
    from pensieve.lab.trial.job import Job, open_tracking
    from pensieve.lab.trial.run import run_trial

    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path))
    monkeypatch.setenv("PENSIEVE_DB_URL", url)
    cfg = composed("tracking=postgres", "tracking.mlflow=false", *SHORT, "trial.isolate=true")
    tracking = open_tracking(check(cfg).tracking)
    outcome = run_trial(Job("x", tmp_path / "x", resolved(cfg)), tracking)
    assert outcome.completed, outcome.error
    assert (
        len(tracking.store.turns_of(outcome.trial_id))
        == tracking.store.trial(outcome.trial_id).engine["workload"]["turns"]
    )
    assert PASSWORD not in tracking.store.database.shown
    with tracking.store.database.reading() as connection:
        for table in CONTRACT:
            assert PASSWORD not in str(connection.execute(text(f"SELECT * FROM {table}")).all()), table
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or PASSWORD.encode() not in file.read_bytes(), file
