from __future__ import annotations

import multiprocessing
import os
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text

from pensieve.errors import ResultsError
from pensieve.lab.results.schema import SCHEMA_VERSION, VERSION_TABLE, Database
from pensieve.lab.results.store import ResultsStore, open_store
from tests.results.trials import conversation_turns, trial_fields

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


@pytest.mark.parametrize("damage", ["no database", "cut off", "overwritten header", "one byte"])
def test_a_damaged_file_is_refused_and_left_as_it_is(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "results.db"
    sound = filled(path)
    bad = {
        "no database": b"these are my notes\n" * 100,
        "cut off": sound[: len(sound) // 2],
        "overwritten header": b"\xff" * 64 + sound[64:],
        "one byte": b"x",
    }[damage]
    path.write_bytes(bad)
    with pytest.raises(ResultsError, match=r"results\.db is damaged.*move it away") as raised:
        open_store(tmp_path)
    assert path.read_bytes() == bad
    assert "\n" not in str(raised.value)


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


def test_folders_that_are_not_there_and_readers_that_make_no_database(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=r"folder .*nowhere.* does not exist"):
        ResultsStore(f"sqlite:///{tmp_path}/nowhere/results.db")
    for outputs in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ResultsError, match=r"no results .*runners/run\.py"):
            open_store(outputs, create=False)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ResultsError, match=r"cannot be made .*PENSIEVE_OUTPUTS"):
        open_store(tmp_path / "file" / "outputs")


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


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    trial = store.begin_trial(trial_fields())

    def interrupted() -> Any:
        yield from conversation_turns([10.0] * 3000)  # more than one batch
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.add_turns(trial, interrupted())
    assert store.turns_of(trial) == []


@pytest.mark.slow
def test_many_processes_create_and_write_at_once(tmp_path: Path) -> None:
    """Trials of 13 turns, of which none is lost."""
    failures, processes, trials = FORK.SimpleQueue(), 16, 12

    def work(number: int) -> None:
        try:
            store = open_store(tmp_path / "outputs")
            for index in range(trials):
                trial = store.begin_trial(trial_fields(f"{number}/{index}"))
                store.add_turns(trial, conversation_turns([1.0] * 4))
                store.finish_trial(trial, "completed")
        except BaseException as error:
            failures.put(f"{type(error).__name__}: {error}")

    started = [FORK.Process(target=work, args=(number,)) for number in range(processes)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert failures.empty(), failures.get()
    with open_store(tmp_path / "outputs").database.reading() as connection:
        assert connection.scalar(text("SELECT count(*) FROM current_trial")) == processes * trials
        assert connection.scalar(text("SELECT count(*) FROM turn")) == processes * trials * 13


def test_urls_that_cannot_work_say_so_without_the_password() -> None:
    with pytest.raises(ResultsError, match="URL cannot be read"):
        Database("not a url")
    with pytest.raises(ResultsError) as raised:
        Database("nosuchdb+driver://me:secret@host/db")
    assert "driver" in str(raised.value)
    assert "secret" not in str(raised.value)
