"""Conversations that outlive their server: tokens, messages, turns and stored responses in one SQLite file.

A turn is in the file before its client is told that it ended, so a server that was killed knows every turn that anybody saw
end; one under way is as though it had never been asked. KV is not here: it is in the disk tier, or computed again.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pensieve.errors import ConfigError
from pensieve.serve.record import Miss, TurnRecord
from pensieve.serve.server.conversations import Conversation, Conversations, Keeper, Mark, Stored

log = logging.getLogger(__name__)

_VERSION = 4
_CACHE_KIB = 2048  # pages of the file that SQLite holds in memory; its own default, so that it is no surprise

# A turn has what it added: the tokens and messages behind those of the turns before it. A conversation's `sum` is of itself
# and all its turns: one that is missing shows as one that has changed.
_TABLES = """
CREATE TABLE conversation(id INTEGER PRIMARY KEY, model TEXT NOT NULL, about TEXT NOT NULL, sum INTEGER NOT NULL);
CREATE TABLE turn(
    conversation INTEGER NOT NULL REFERENCES conversation ON DELETE CASCADE, place INTEGER NOT NULL, start INTEGER NOT NULL,
    tokens BLOB NOT NULL, told TEXT NOT NULL, PRIMARY KEY(conversation, place)) WITHOUT ROWID;
CREATE TABLE response(
    id TEXT PRIMARY KEY, number INTEGER NOT NULL, conversation INTEGER NOT NULL REFERENCES conversation ON DELETE CASCADE,
    length INTEGER NOT NULL, instructed INTEGER NOT NULL, body TEXT NOT NULL, sum INTEGER NOT NULL);
CREATE INDEX response_of ON response(conversation);
"""

_ABOUT = ("tenant", "id", "engine_name", "named", "created_at", "used_at", "keep_alive_s", "parent", "asked")
_NOT_KEPT = ("token_ids", "margins", "emitted_s", "stored", "missed", "misses")
_TURN_FIELDS = tuple(field.name for field in dataclasses.fields(TurnRecord) if field.name not in _NOT_KEPT)


class StateUnreadable(ConfigError):
    """The file is damaged, of another version, or none of a server's."""


def open_own(path: Path, model: str, say: Callable[[str], None]) -> StateFile:
    """Open the file that servers keep at this place. One that cannot be read is set aside under another name, which `say` is
    told, and an empty one begins. Raises ConfigError where another server has it open, or the disk refuses."""
    try:
        return StateFile(path, model)
    except StateUnreadable as error:
        aside = path.with_name(f"{path.name}.unreadable-{datetime.now(UTC):%Y%m%d-%H%M%S}")
        for end in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                path.with_name(path.name + end).replace(aside.with_name(aside.name + end))
        say(f"{path} cannot be read ({error.__cause__}): it is {aside} now, and no conversation is restored.")
        return StateFile(path, model)


class StateFile(Keeper):
    """One server at a time has it open. Conversations of another model, or of the same one with other weights, stay in the
    file and are not told of: their tokens mean something else.

    A disk that fails costs what it should have kept, with a line in the log; the server goes on.
    """

    def __init__(self, path: Path, model: str) -> None:
        """model: names the weights and the tokenizer. Raises ConfigError where the file is not ours, or another server has
        it open."""
        self.path, self._model = path, model
        self._lock = threading.Lock()
        self._rows: dict[Conversation, _Row] = {}
        self._responses = 0
        self._deleted_text = False  # and the write-ahead log may still hold it
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # it holds what people said
            self._database = sqlite3.connect(path, timeout=0.0, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(_why_not(path, error)) from error
        try:
            self._prepare()
        except (sqlite3.Error, UnicodeError) as error:
            self._database.close()
            refused = ConfigError if isinstance(error, sqlite3.OperationalError) else StateUnreadable
            raise refused(_why_not(path, error)) from error

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

    # -- read ---------------------------------------------------------------------------------------------------------

    def restore(self, conversations: Conversations) -> int:
        """Restore all that this model's conversations held, and keep their changes from now on. Returns their number. What is
        damaged costs a line in the log and is left out as a whole: no conversation has other tokens than it had."""
        by_id: dict[int, Conversation] = {}
        run, damaged = self._database.execute, 0
        try:
            kept = run("SELECT id, about, sum FROM conversation WHERE model = ? ORDER BY id", (self._model,)).fetchall()
            for row_id, about, total in kept:
                try:
                    conversation = self._conversation(row_id, about, total)
                except _UNREADABLE:
                    damaged += 1
                    continue
                conversations.restore(conversation)
                by_id[row_id] = conversation
            for response_id, *fields, total in run("SELECT * FROM response ORDER BY number").fetchall():
                number, row_id, length, instructed, body = fields
                owner = by_id.get(row_id)
                mark = next((m for m in reversed(owner.marks) if m.length == length), None) if owner else None
                if total != _sum(response_id, *fields):
                    damaged += 1
                elif owner is not None and mark is not None:
                    conversations.store(response_id, Stored(json.loads(body), owner, mark, bool(instructed)))
                self._responses = max(self._responses, number + 1)
        except _UNREADABLE as error:
            log.error("%s is damaged (%s): what could not be read is left out.", self.path, error)
        if damaged:
            log.error("%s is damaged: %d conversations and responses are left out.", self.path, damaged)
        self._conversations, conversations.keeper = conversations, self
        return len(by_id)

    def _conversation(self, row_id: int, about: str, total: int) -> Conversation:
        """Raises one of _UNREADABLE for a damaged one."""
        row, tokens = _Row(row_id), array("i")
        turns = self._database.execute(
            "SELECT start, tokens, told FROM turn WHERE conversation = ? ORDER BY place", (row_id,)
        )
        for start, piece, text in turns:
            del tokens[start:]
            tokens.frombytes(piece)
            told = json.loads(text)
            key = told["key"] and bytes.fromhex(told["key"])
            row.marks.append(Mark(told["length"], _turn(told["turn"]), told["asked"], told["messages"], key))
            row.said += told["said"]
            row.sums.append(_sum(start, piece, text))
        if total != _sum(row_id, about, row.sums):
            raise ValueError("a checksum is another one")
        known = json.loads(about)
        made = Conversation(**{name: known[name] for name in _ABOUT}, tokens=tokens, marks=list(row.marks))
        if known["has_messages"]:
            made.messages = [message for message, _ in row.said]
            made.replies = {place: reply for place, (_, reply) in enumerate(row.said) if reply is not None}
        self._rows[made] = row
        return made

    # -- write --------------------------------------------------------------------------------------------------------

    def settled(self, conversation: Conversation) -> None:
        """Write a turn that stands, and what it has replaced."""
        with self._conversations.lock, self._writing(conversation):
            row = self._rows.get(conversation)
            if row is None:
                insert = "INSERT INTO conversation VALUES (NULL, ?, '', 0)"
                made = self._database.execute(insert, (self._model,)).lastrowid
                assert made is not None
                row = self._rows[conversation] = _Row(made)
            self._append(conversation, row)
            about = {name: getattr(conversation, name) for name in _ABOUT}
            text = _json({**about, "has_messages": conversation.messages is not None})
            total = _sum(row.id, text, row.sums)
            self._database.execute("UPDATE conversation SET about = ?, sum = ? WHERE id = ?", (text, total, row.id))

    def _append(self, c: Conversation, row: _Row) -> None:
        said = [[message, c.replies.get(place)] for place, message in enumerate(c.messages or ())]
        same = next((i for i, (a, b) in enumerate(zip(row.marks, c.marks, strict=False)) if a is not b), len(row.marks))
        told = c.marks[same - 1].messages if same else 0
        if said[:told] != row.said[:told]:  # the same tokens say something else, or nothing
            same = told = 0
        self._database.execute("DELETE FROM turn WHERE conversation = ? AND place >= ?", (row.id, same))
        del row.sums[same:]
        for place, mark in enumerate(c.marks[same:], start=same):
            last = place == len(c.marks) - 1
            start = c.marks[place - 1].length if place else 0
            piece = c.tokens[start : None if last else mark.length].tobytes()
            more = said[told : None if last else mark.messages]
            told += len(more)
            own = {"length": mark.length, "asked": mark.asked, "messages": mark.messages, "said": more}
            text = _json({**own, "key": mark.key and mark.key.hex(), "turn": _plain(mark.turn)})
            row.sums.append(_sum(start, piece, text))
            self._database.execute("INSERT INTO turn VALUES (?, ?, ?, ?, ?)", (row.id, place, start, piece, text))
        row.marks, row.said = list(c.marks), said

    def removed(self, conversation: Conversation) -> None:
        with self._writing(conversation):
            row = self._rows.pop(conversation, None)
            if row is not None:
                self._database.execute("DELETE FROM conversation WHERE id = ?", (row.id,))
                self._deleted_text = True

    def stored(self, response_id: str, stored: Stored) -> None:
        with self._writing(stored.conversation):
            row = self._rows.get(stored.conversation)
            if row is None:
                return  # its conversation could not be kept
            told = (int(stored.instructed), _json(stored.body))
            fields = (response_id, self._responses, row.id, stored.mark.length, *told)
            self._database.execute("INSERT INTO response VALUES (?, ?, ?, ?, ?, ?, ?)", (*fields, _sum(*fields)))
            self._responses += 1

    def unstored(self, response_id: str) -> None:
        with self._writing(None):
            self._database.execute("DELETE FROM response WHERE id = ?", (response_id,))
            self._deleted_text = True

    @contextmanager
    def _writing(self, conversation: Conversation | None) -> Iterator[None]:
        """Run the block in one transaction. After one that failed, the conversation's next turn writes all of it."""
        with self._lock:
            before = None if conversation is None else self._rows.get(conversation)
            try:
                self._database.execute("BEGIN")
                yield
                self._database.execute("COMMIT")
            except sqlite3.Error as error:
                log.error(
                    "%s cannot be written (%s): what was said last would not outlive this server.", self.path, error
                )
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                if conversation is not None:
                    self._rows.pop(conversation, None)
                    if before is not None:
                        self._rows[conversation] = _Row(before.id)

    def tidy(self) -> None:
        """Fold the write-ahead log into the file, and empty it where it holds deleted text; in a thread that nobody waits
        for, though a turn that ends meanwhile does."""
        with self._lock:
            try:
                self._database.execute(f"PRAGMA wal_checkpoint({'TRUNCATE' if self._deleted_text else 'PASSIVE'})")
                self._deleted_text = False
            except sqlite3.Error as error:
                log.error("%s cannot be tidied: %s", self.path, error)

    def close(self) -> None:
        with self._lock:
            self._database.close()


@dataclasses.dataclass(slots=True)
class _Row:
    """What the file has of a conversation. said: each message, and the model's own tokens where it said it; sums: a checksum
    of each turn."""

    id: int
    marks: list[Mark] = dataclasses.field(default_factory=list)
    said: list[list[Any]] = dataclasses.field(default_factory=list)
    sums: list[int] = dataclasses.field(default_factory=list)


_UNREADABLE = (sqlite3.Error, ValueError, TypeError, KeyError, OverflowError, MemoryError)
"""What reading a damaged file raises; a text that is no UTF-8 any more is a ValueError."""


def _sum(*values: object) -> int:
    return zlib.crc32(repr(values).encode())


def _plain(turn: TurnRecord) -> dict[str, Any]:
    told = {name: getattr(turn, name) for name in _TURN_FIELDS}
    # Moments of a clock that ends with the process mean nothing to the next one.
    misses = [{**dataclasses.asdict(miss), "evicted_s": None} for miss in turn.misses]
    return {**told, "misses": misses}


def _turn(told: dict[str, Any]) -> TurnRecord:
    misses = tuple(Miss(**miss) for miss in told.pop("misses"))
    return TurnRecord(**{name: value for name, value in told.items() if name in _TURN_FIELDS}, misses=misses)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))


def _why_not(path: Path, error: Exception) -> str:
    if "locked" in str(error):
        return (
            f"{path} is open in another server; give this one a file of its own (serve.state=PATH), or serve.state=off."
        )
    return (
        f"{path} cannot keep conversations ({error}); move it away, give another file (serve.state=PATH), or let them end "
        "with the process (serve.state=off)."
    )
