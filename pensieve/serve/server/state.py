"""Conversations and responses that outlive their server, in one SQLite file.

A row is a conversation as of its last turn that stands, written before whoever waits for the turn is told: one that is killed
later, at whatever moment, leaves all that it has told of.
"""

import json
import logging
import os
import sqlite3
import threading
from array import array
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pensieve.errors import ConfigError
from pensieve.serve.server.conversations import Conversation, Conversations, Mark, Stored

log = logging.getLogger(__name__)

_VERSION = 7
_TABLE = """
CREATE TABLE conversation(
    model TEXT NOT NULL, tenant TEXT NOT NULL, id TEXT NOT NULL, tokens BLOB NOT NULL, told TEXT NOT NULL,
    PRIMARY KEY(model, tenant, id));
"""
_TOLD = ("named", "created_at", "used_at", "keep_alive_s", "parent", "asked", "messages")


class StateFile:
    """One server at a time has it open. Conversations of another model, or of the same one with other weights, stay in the
    file and are not told of: their tokens mean something else.

    A disk that fails costs what it should have kept, with a line in the log; the server goes on.
    """

    def __init__(self, path: Path, model: str) -> None:
        """model: names the weights and the tokenizer. Raises ConfigError where the file is not ours, cannot be read, or is
        open in another server."""
        self.path, self._model = path, model
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # it holds what people said
            self._database = sqlite3.connect(path, timeout=0.0, isolation_level=None, check_same_thread=False)
            try:
                self._prepare()
            except sqlite3.Error:
                self._database.close()
                raise
        except (OSError, sqlite3.Error) as error:
            why = "it is open in another server" if "locked" in str(error) else str(error)
            raise ConfigError(
                f"{path} cannot keep conversations ({why}); move it away, give another file (serve.state=PATH), or let them "
                "end with the process (serve.state=off)."
            ) from error

    def _prepare(self) -> None:
        run = self._database.execute
        run("PRAGMA locking_mode = EXCLUSIVE")
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = NORMAL")  # a killed process loses nothing; a machine without power the last turns
        run("PRAGMA wal_autocheckpoint = 0")
        run("PRAGMA secure_delete = ON")  # what was deleted is overwritten
        version = run("PRAGMA user_version").fetchone()[0]
        if version == 0 and not run("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            self._database.executescript(f"BEGIN; {_TABLE} PRAGMA user_version = {_VERSION}; COMMIT;")
        elif version != _VERSION:
            raise sqlite3.DatabaseError(f"its version is {version}, and this server reads {_VERSION}")
        run("BEGIN EXCLUSIVE")  # takes the lock now, not at the first turn
        run("COMMIT")

    def restore(self, conversations: Conversations) -> int:
        """Restore all that this model's conversations held, and keep their changes from now on. Returns their number. What
        cannot be read costs a line in the log and is left out."""
        restored, columns = 0, "tenant, id, tokens, told"
        try:
            for tenant, name, tokens, text in self._database.execute(
                f"SELECT {columns} FROM conversation WHERE model = ? ORDER BY rowid", (self._model,)
            ):
                told = json.loads(text)
                told["marks"] = [Mark(**mark) for mark in told["marks"]]
                told["stored"] = {key: Stored(**one) for key, one in told["stored"].items()}
                conversations.restore(Conversation(tokens=array("i", tokens), tenant=tenant, id=name, **told))
                restored += 1
        except (sqlite3.Error, ValueError, TypeError, KeyError) as error:
            log.error("%s is damaged (%s): what could not be read is left out.", self.path, error)
        conversations.keeper = self
        return restored

    def settled(self, conversation: Conversation) -> None:
        """Write a conversation of which a turn stands, with the responses that it has now."""
        told: dict[str, Any] = {name: getattr(conversation, name) for name in _TOLD}
        told["marks"] = [asdict(mark) for mark in conversation.marks]
        told["stored"] = {key: asdict(one) for key, one in list(conversation.stored.items())}
        self._write(
            "INSERT INTO conversation VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET tokens = excluded.tokens, "
            "told = excluded.told",
            *(self._model, conversation.tenant, conversation.id, conversation.tokens.tobytes(), json.dumps(told)),
        )

    def removed(self, conversation: Conversation) -> None:
        key = (self._model, conversation.tenant, conversation.id)
        self._write("DELETE FROM conversation WHERE model = ? AND tenant = ? AND id = ?", *key)

    def tidy(self) -> None:
        """Fold the write-ahead log, which may hold deleted text, into the file; in a thread that nobody waits for, though a
        turn that ends meanwhile does."""
        self._write("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def _write(self, statement: str, *values: object) -> None:
        """Run it in a transaction of its own. The next turn of a conversation writes what one that failed should have."""
        with self._lock:
            try:
                self._database.execute(statement, values)
            except sqlite3.Error as error:
                log.error(
                    "%s cannot be written (%s): what was said last may not outlive this server.", self.path, error
                )
