import multiprocessing
import os
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, inspect, text
from sqlalchemy.exc import IntegrityError

from pensieve.errors import ResultsError
from pensieve.lab.results.schema import SCHEMA_VERSION, VERSION_TABLE, Database
from pensieve.lab.results.store import ResultsStore, open_store
from tests.results.trials import MEMORY, conversation_turns, trial_fields

FORK = multiprocessing.get_context("fork")


def in_another_process(function: Callable[..., Any], *arguments: Any) -> str:
    """What the function returns, or the sentence of the ResultsError that it raises."""
    receiver, sender = FORK.Pipe(duplex=False)

    def run() -> None:
        try:
            sender.send(str(function(*arguments)))
        except ResultsError as error:
            sender.send(str(error))

    process = FORK.Process(target=run)
    process.start()
    sender.close()
    answer: str = receiver.recv()
    process.join()
    return answer


def filled(path: Path) -> bytes:
    """A sound database of some pages."""
    store = ResultsStore(f"sqlite:///{path}")
    trial = store.begin_trial(trial_fields())
    store.add_turns(trial, conversation_turns([10.0] * 50, sessions=20))
    store.finish_trial(trial, "completed")
    return path.read_bytes()


def test_a_damaged_file_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    sound = filled(path)
    for bad in (b"these are my notes\n" * 100, sound[: len(sound) // 2], b"\xff" * 64 + sound[64:], b"x"):
        path.write_bytes(bad)
        with pytest.raises(ResultsError, match=r"results\.db is damaged.*move it away"):
            open_store(tmp_path)
        assert path.read_bytes() == bad


def test_someone_elses_database_and_another_version_are_refused_and_left_as_they_are(tmp_path: Path) -> None:
    path, theirs = tmp_path / "results.db", tmp_path / "theirs"
    store = open_store(tmp_path)
    with store.database.writing() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '0099'"))
    theirs.mkdir()
    with sqlite3.connect(theirs / "results.db") as connection:
        connection.execute("CREATE TABLE runs (id INTEGER)")
    connection.close()
    for outputs, said in (
        (tmp_path, f"schema version 0099, this Pensieve reads {SCHEMA_VERSION}"),
        (theirs, "not one of"),
    ):
        path = outputs / "results.db"
        before = path.read_bytes()
        with pytest.raises(ResultsError, match=said):
            open_store(outputs)
        assert path.read_bytes() == before


@pytest.mark.parametrize("exists", [False, True], ids=["new", "existing"])
def test_a_folder_without_write_permission(exists: bool) -> None:
    def open_as_nobody(folder: Path) -> None:
        if os.getuid() == 0:
            os.setgid(65534)
            os.setuid(65534)  # permissions do not bind root
        open_store(folder)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if exists:
            filled(folder / "results.db")
            (folder / "results.db").chmod(0o444)
        before = sorted(folder.iterdir())
        folder.chmod(0o555)
        sentence = in_another_process(open_as_nobody, folder)
        assert sorted(folder.iterdir()) == before
        folder.chmod(0o755)
    assert f"The results database {folder}/results.db cannot be" in sentence
    assert "permission" in sentence or "may write" in sentence


def test_a_full_disk_keeps_what_was_whole(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    trial = store.begin_trial(trial_fields())
    store.add_turns(trial, conversation_turns([10.0] * 2))

    @event.listens_for(store.database.engine, "connect")
    def _no_more_pages(connection: Any, _record: Any) -> None:
        connection.execute("PRAGMA max_page_count = 60")

    with pytest.raises(ResultsError, match="the disk is full"):
        store.add_turns(trial, conversation_turns([10.0] * 200, sessions=50))
    assert len(store.turns_of(trial)) == 7


def test_while_it_is_held_the_log_is_not_copied_for_each_transaction(tmp_path: Path) -> None:
    store, log = open_store(tmp_path), tmp_path / "results.db-wal"
    file = tmp_path / "results.db"
    trial = store.begin_trial(trial_fields())
    assert not log.exists()
    before = file.read_bytes()
    with store.database.held():
        for _ in range(5):
            store.add_turns(trial, conversation_turns([10.0] * 4))
        assert log.stat().st_size > 0
        assert file.read_bytes() == before
        assert len(store.turns_of(trial)) == 5 * 13
    assert not log.exists()
    assert file.read_bytes() != before


def test_urls_that_cannot_work_say_so_without_the_password() -> None:
    with pytest.raises(ResultsError, match="URL cannot be read"):
        Database("not a url")
    with pytest.raises(ResultsError) as raised:
        Database("nosuchdb+driver://me:secret@host/db")
    assert "driver" in str(raised.value)
    assert "secret" not in str(raised.value)


CONTRACT = {
    "sweep": "id key name experiment command overrides n_expected status host git_commit mlflow_run_id started_at "
    "finished_at",
    "sweep_trial": "sweep_id trial_id job reused",
    "trial": "id fingerprint config_hash code_hash platform attempt experiment model baseline eviction scheduler cache "
    "workload hardware seed repeat weights model_revision dtype device device_count simulated contended gpu_tokens "
    "cpu_tokens gpu_bytes cpu_bytes kv_bytes_per_token working_set_tokens measure_start_s measure_end_s status error "
    "traceback host pid process_started_at heartbeat_at started_at finished_at git_commit mlflow_run_id config "
    "environment engine flags",
    "metric": "trial_id name label value unit n n_unit ci_low ci_high limit_value",
    "turn": "id trial_id ordinal session turn iteration label phase stream status finish_reason error intended_s sent_s "
    "arrived_s admitted_s first_token_s finished_s queue_ms ttft_ms latency_ms compute_ms transfer_ms prompt_tokens "
    "output_tokens history_tokens gpu_hit_tokens cpu_hit_tokens recomputed_tokens shared_hit_tokens new_tokens "
    "resumed_swapped_tokens resumed_recomputed_tokens cpu_recomputed_tokens h2d_bytes d2h_bytes sent_bytes "
    "received_bytes output_sha256 disk_hit_tokens",
    "sample": "trial_id at_s device name value unit",
    "miss": "trial_id turn_id cause evicted_by tokens ms",
    "holding": "trial_id session tier gib_s saved_s idle_gib_s",
    "artifact": "trial_id kind path sha256",
    "claim": "sweep_id name claimed measured ci_low ci_high n verdict trial_ids",
    VERSION_TABLE: "version_num",
}


@pytest.fixture
def store() -> ResultsStore:
    return ResultsStore(MEMORY)


def test_tables_and_columns_are_the_contract(store: ResultsStore) -> None:
    with store.database.reading() as connection:
        inspector = inspect(connection)
        found = {t: " ".join(c["name"] for c in inspector.get_columns(t)) for t in inspector.get_table_names()}
        view = " ".join(c["name"] for c in inspector.get_columns("current_trial"))
    assert found == CONTRACT
    assert view == CONTRACT["trial"]


@pytest.mark.parametrize(
    ("status", "attempt"), [("completed", 1), ("running", 2)], ids=["same attempt twice", "two running"]
)
def test_uniqueness_of_trials(store: ResultsStore, status: str, attempt: int) -> None:
    trial = store.begin_trial(trial_fields())
    columns = [c for c in CONTRACT["trial"].split() if c not in ("id", "status", "attempt")]
    copied = ", ".join(columns)
    statement = text(f"INSERT INTO trial ({copied}, status, attempt) SELECT {copied}, :s, :a FROM trial WHERE id = :id")
    with pytest.raises(IntegrityError), store.database.writing() as connection:
        connection.execute(statement, {"s": status, "a": attempt, "id": trial})
    with store.database.writing() as connection:  # what the constraints allow
        connection.execute(statement, {"s": "completed", "a": 2, "id": trial})
