"""Conversations and responses that outlive their server, in one SQLite file.

A row is a conversation as of its last turn that stands, written before whoever waits for the turn is told: one that is killed
later, at whatever moment, leaves all that it has told of. A row is restored whole or, where a byte of it has changed, not.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sqlite3
import threading
import zlib
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pensieve.errors import ConfigError
from pensieve.serve.record import Miss, TurnRecord
from pensieve.serve.server.conversations import Conversation, Conversations, Mark, Stored

log = logging.getLogger(__name__)

_VERSION = 5
_CACHE_KIB = 2048  # pages of the file that SQLite holds in memory; its own default, so that it is no surprise

_TABLES = """
CREATE TABLE conversation(
    model TEXT NOT NULL, tenant TEXT NOT NULL, id TEXT NOT NULL, tokens BLOB NOT NULL, told TEXT NOT NULL,
    sum INTEGER NOT NULL, PRIMARY KEY(model, tenant, id));
CREATE TABLE response(
    model TEXT NOT NULL, tenant TEXT NOT NULL, conversation TEXT NOT NULL, id TEXT PRIMARY KEY, length INTEGER NOT NULL,
    instructed INTEGER NOT NULL, body TEXT NOT NULL, sum INTEGER NOT NULL,
    FOREIGN KEY(model, tenant, conversation) REFERENCES conversation ON DELETE CASCADE);
CREATE INDEX response_of ON response(model, tenant, conversation);
"""

_ABOUT = ("named", "created_at", "used_at", "keep_alive_s", "parent", "asked", "messages")
_NOT_KEPT = ("token_ids", "margins", "emitted_s", "stored", "missed", "misses")
_TURN_FIELDS = tuple(field.name for field in dataclasses.fields(TurnRecord) if field.name not in _NOT_KEPT)
_UNREADABLE = (sqlite3.Error, ValueError, TypeError, KeyError, OverflowError, MemoryError)
"""What reading a damaged file raises; a text that is no UTF-8 any more is a ValueError."""


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
        except (OSError, sqlite3.Error) as error:
            raise _refused(path, error) from error
        try:
            self._prepare()
        except (sqlite3.Error, UnicodeError) as error:
            self._database.close()
            raise _refused(path, error) from error

    def _prepare(self) -> None:
        run = self._database.execute
        run("PRAGMA locking_mode = EXCLUSIVE")
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = NORMAL")  # a killed process loses nothing; a machine without power the last turns
        run("PRAGMA wal_autocheckpoint = 0")
        run(f"PRAGMA cache_size = {-_CACHE_KIB}")
        run("PRAGMA foreign_keys = ON")
        run("PRAGMA secure_delete = ON")  # what was deleted is overwritten
        version = run("PRAGMA user_version").fetchone()[0]
        if version == 0 and not run("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            self._database.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {_VERSION}; COMMIT;")
        elif version != _VERSION:
            raise sqlite3.DatabaseError(f"its version is {version}, and this server reads {_VERSION}")
        run("BEGIN EXCLUSIVE")  # takes the lock now, not at the first turn
        run("COMMIT")

    def restore(self, conversations: Conversations) -> int:
        """Restore all that this model's conversations held, and keep their changes from now on. Returns their number. What is
        damaged costs a line in the log and is left out: no conversation has other tokens than it had."""
        restored = damaged = 0
        try:
            for *row, total in self._database.execute("SELECT * FROM conversation ORDER BY rowid"):
                if total != _sum(row):
                    damaged += 1
                elif row[0] == self._model:
                    conversations.restore(_conversation(*row[1:]))
                    restored += 1
            for *row, total in self._database.execute("SELECT * FROM response ORDER BY rowid"):
                model, tenant, name, response_id, length, instructed, body = row
                owner = conversations.find(tenant, name) if model == self._model else None
                mark = next((m for m in reversed(owner.marks) if m.length == length), None) if owner else None
                if total != _sum(row):
                    damaged += 1
                elif owner is not None and mark is not None:
                    conversations.store(response_id, Stored(json.loads(body), owner, mark, bool(instructed)))
        except _UNREADABLE as error:
            log.error("%s is damaged (%s): what could not be read is left out.", self.path, error)
        if damaged:
            log.error("%s is damaged: %d conversations and responses are left out.", self.path, damaged)
        conversations.keeper = self
        return restored

    def settled(self, conversation: Conversation) -> None:
        """Write a conversation of which a turn stands."""
        told = {name: getattr(conversation, name) for name in _ABOUT}
        told |= {"replies": conversation.replies, "marks": [_mark_told(mark) for mark in conversation.marks]}
        row = (self._model, conversation.tenant, conversation.id, conversation.tokens.tobytes(), _json(told))
        update = "SET tokens = excluded.tokens, told = excluded.told, sum = excluded.sum"
        self._write(
            f"INSERT INTO conversation VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE {update}", *row, _sum(row)
        )

    def removed(self, conversation: Conversation) -> None:
        key = (self._model, conversation.tenant, conversation.id)
        self._write("DELETE FROM conversation WHERE model = ? AND tenant = ? AND id = ?", *key)

    def stored(self, response_id: str, stored: Stored) -> None:
        owner = (self._model, stored.conversation.tenant, stored.conversation.id)
        row = (*owner, response_id, stored.mark.length, int(stored.instructed), _json(stored.body))
        self._write("INSERT INTO response VALUES (?, ?, ?, ?, ?, ?, ?, ?)", *row, _sum(row))

    def unstored(self, response_id: str) -> None:
        self._write("DELETE FROM response WHERE id = ?", response_id)

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


def _conversation(tenant: str, name: str, tokens: bytes, text: str) -> Conversation:
    told = json.loads(text)
    marks = [_mark(**one) for one in told.pop("marks")]
    replies = {int(place): ids for place, ids in told.pop("replies").items()}
    return Conversation(tenant=tenant, id=name, tokens=array("i", tokens), marks=marks, replies=replies, **told)


def _mark_told(mark: Mark) -> dict[str, Any]:
    turn = {name: getattr(mark.turn, name) for name in _TURN_FIELDS}
    # Moments of a clock that ends with the process mean nothing to the next one.
    turn["misses"] = [{**dataclasses.asdict(miss), "evicted_s": None} for miss in mark.turn.misses]
    own = {"length": mark.length, "asked": mark.asked, "messages": mark.messages}
    return {**own, "key": mark.key and mark.key.hex(), "turn": turn}


def _mark(turn: dict[str, Any], key: str | None, **own: int) -> Mark:
    misses = tuple(Miss(**miss) for miss in turn.pop("misses"))
    return Mark(turn=TurnRecord(**turn, misses=misses), key=None if key is None else bytes.fromhex(key), **own)


def _sum(row: Iterable[object]) -> int:
    total = 0
    for value in row:
        total = zlib.crc32(value if isinstance(value, bytes) else f"{value}\n".encode(), total)
    return total


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))


def _refused(path: Path, error: Exception) -> ConfigError:
    why = "it is open in another server" if "locked" in str(error) else str(error)
    return ConfigError(
        f"{path} cannot keep conversations ({why}); move it away, give another file (serve.state=PATH), or let them end "
        "with the process (serve.state=off)."
    )
