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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pensieve.errors import ConfigError
from pensieve.serve.record import Miss, TurnRecord
from pensieve.serve.server.conversations import Conversation, Conversations, Mark, Message
from pensieve.serve.server.responses import ResponseStore, Stored

log = logging.getLogger(__name__)

_VERSION = 2
_CACHE_KIB = 2048  # pages of the file that SQLite holds in memory; its own default, so that it is no surprise
_CHECKPOINT_PAGES = 256  # of the write-ahead log; `tidy` folds it into the file, so that no turn waits for the disk

# A conversation's tokens are an account of changes: from position `start` on they are these, the newest row last. Its `sum`
# is of all its rows in all tables but `response`: one that is missing shows as one that has changed.
_TABLES = """
CREATE TABLE conversation(
    id INTEGER PRIMARY KEY, model TEXT NOT NULL, tenant TEXT NOT NULL, name TEXT NOT NULL, engine_name TEXT NOT NULL,
    named INTEGER NOT NULL, created_at REAL NOT NULL, used_at REAL NOT NULL, keep_alive_s REAL, parent TEXT,
    asked INTEGER NOT NULL, has_messages INTEGER NOT NULL, sum INTEGER NOT NULL);
CREATE TABLE piece(
    id INTEGER PRIMARY KEY, conversation INTEGER NOT NULL REFERENCES conversation ON DELETE CASCADE, start INTEGER NOT NULL,
    tokens BLOB NOT NULL);
CREATE TABLE message(
    conversation INTEGER NOT NULL REFERENCES conversation ON DELETE CASCADE, place INTEGER NOT NULL, body TEXT NOT NULL,
    reply BLOB, PRIMARY KEY(conversation, place)) WITHOUT ROWID;
CREATE TABLE mark(
    conversation INTEGER NOT NULL REFERENCES conversation ON DELETE CASCADE, place INTEGER NOT NULL, length INTEGER NOT NULL,
    asked INTEGER NOT NULL, messages INTEGER NOT NULL, key BLOB, turn TEXT NOT NULL, PRIMARY KEY(conversation, place))
    WITHOUT ROWID;
CREATE TABLE response(
    id TEXT PRIMARY KEY, number INTEGER NOT NULL, conversation INTEGER NOT NULL REFERENCES conversation ON DELETE CASCADE,
    length INTEGER NOT NULL, instructed INTEGER NOT NULL, body TEXT NOT NULL, sum INTEGER NOT NULL);
CREATE INDEX piece_of ON piece(conversation);
CREATE INDEX response_of ON response(conversation);
"""

_OWN = (
    "model = ?, tenant = ?, name = ?, engine_name = ?, named = ?, created_at = ?, used_at = ?, keep_alive_s = ?, parent = ?, "
    "asked = ?, has_messages = ?"
)
"""Of table `conversation`, in its order."""

_Said = tuple[Message, list[int] | None]
"""A message, and the model's own tokens where it said it."""

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


class StateFile:
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
        except sqlite3.Error as error:
            self._database.close()
            unreadable = isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError)
            raise (StateUnreadable if unreadable else ConfigError)(_why_not(path, error)) from error

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

    def restore(self, conversations: Conversations, responses: ResponseStore) -> int:
        """Restore all that this model's conversations held, and keep their changes from now on. Returns their number. What is
        damaged costs a line in the log and is left out as a whole: no conversation has other tokens than it had."""
        by_id: dict[int, Conversation] = {}
        damaged = 0
        try:
            for row_id, *fields, total in self._rows_of(
                "SELECT * FROM conversation WHERE model = ? ORDER BY id", self._model
            ):
                try:
                    conversation = self._conversation(row_id, tuple(fields), total)
                except _UNREADABLE:
                    damaged += 1
                    continue
                conversations.restore(conversation)
                by_id[row_id] = conversation
            for response_id, number, row_id, length, instructed, body, total in self._rows_of(
                "SELECT * FROM response ORDER BY number"
            ):
                if total != _sum(response_id, number, row_id, length, instructed, body):
                    damaged += 1
                    continue
                owner = by_id.get(row_id)
                mark = next((m for m in reversed(owner.marks) if m.length == length), None) if owner else None
                if owner is not None and mark is not None:
                    responses.add(response_id, Stored(owner.tenant, json.loads(body), owner, mark, bool(instructed)))
                self._responses = max(self._responses, number + 1)
        except _UNREADABLE as error:
            log.error("%s is damaged (%s): what could not be read is left out.", self.path, error)
        if damaged:
            log.error("%s is damaged: %d conversations and responses are left out.", self.path, damaged)
        conversations.on_settled, conversations.on_removed = self._settled, self._removed
        responses.on_added, responses.on_deleted = self._added, self._deleted
        self._conversations = conversations
        return len(by_id)

    def _rows_of(self, query: str, *values: object) -> list[Any]:
        return self._database.execute(query, values).fetchall()

    def _conversation(self, row_id: int, fields: tuple[Any, ...], total: int) -> Conversation:
        """Raises one of _UNREADABLE for a damaged one."""
        _, tenant, name, engine_name, named, created_at, used_at, keep_alive_s, parent, asked, has_messages = fields
        pieces, marked, said = (
            list(self._of(row_id, what, order))
            for what, order in (
                ("start, tokens FROM piece", "id"),
                ("length, asked, messages, key, turn FROM mark", "place"),
                ("body, reply FROM message", "place"),
            )
        )
        row = _Row(row_id, name, fields)
        row.pieces = [(start, _sum(piece)) for start, piece in pieces]
        row.mark_sums, row.said_sums = [_sum(*one) for one in marked], [_sum(*one) for one in said]
        if total != row.sum:
            raise ValueError("a checksum is another one")
        tokens = array("i")
        for start, piece in pieces:
            del tokens[start:]
            tokens.frombytes(piece)
        marks = [Mark(length, _turn(turn), before, messages, key) for length, before, messages, key, turn in marked]
        made = Conversation(tenant, name, engine_name, bool(named), created_at, used_at, keep_alive_s, marks)
        made.tokens = tokens
        made.parent, made.asked = parent, asked
        made.messages = [json.loads(body) for body, _ in said] if has_messages else None
        made.replies = {place: _ids(reply) for place, (_, reply) in enumerate(said) if reply is not None}
        row.tokens, row.marks, row.said = len(tokens), marks, _said(made)
        self._rows[made] = row
        return made

    def _of(self, row_id: int, what: str, order: str) -> Iterator[Any]:
        return self._database.execute(f"SELECT {what} WHERE conversation = ? ORDER BY {order}", (row_id,))

    # -- write --------------------------------------------------------------------------------------------------------

    def _settled(self, conversation: Conversation, kept: int) -> None:
        """Write a turn that stands; the conversation's first `kept` tokens are unchanged."""
        with self._conversations.lock, self._writing(conversation):
            row = self._rows.get(conversation)
            parent = self._conversations.find(conversation.tenant, conversation.parent or "")
            if parent is not None:
                self._rename(parent)  # whose name it may have taken
            if row is None:
                for other in list(self._rows):  # or a fork that never settled has taken it before
                    if other.tenant == conversation.tenant:
                        self._rename(other)
                row = self._rows[conversation] = self._insert(conversation)
            else:
                self._rename(conversation)
            self._append(conversation, row, min(kept, row.tokens))

    def _insert(self, conversation: Conversation) -> _Row:
        cursor = self._database.execute(
            "INSERT INTO conversation VALUES (NULL, ?, '', '', '', 0, 0, 0, NULL, NULL, 0, 0, 0)", (self._model,)
        )
        assert cursor.lastrowid is not None
        return _Row(cursor.lastrowid, conversation.id)

    def _append(self, conversation: Conversation, row: _Row, kept: int) -> None:
        c, run = conversation, self._database.execute
        run("DELETE FROM piece WHERE conversation = ? AND start >= ?", (row.id, kept))  # what this replaces as a whole
        piece = c.tokens[kept:].tobytes()
        run("INSERT INTO piece VALUES (NULL, ?, ?, ?)", (row.id, kept, piece))
        pieces = [*((start, total) for start, total in row.pieces if start < kept), (kept, _sum(piece))]
        same = _in_common(row.marks, c.marks)
        run("DELETE FROM mark WHERE conversation = ? AND place >= ?", (row.id, same))
        mark_sums = row.mark_sums[:same]
        for place, mark in enumerate(c.marks[same:], start=same):
            fields = (mark.length, mark.asked, mark.messages, mark.key, _json(_plain(mark.turn)))
            run("INSERT INTO mark VALUES (?, ?, ?, ?, ?, ?, ?)", (row.id, place, *fields))
            mark_sums.append(_sum(*fields))
        said = _said(c)
        same = _in_common(row.said, said)
        run("DELETE FROM message WHERE conversation = ? AND place >= ?", (row.id, same))
        said_sums = row.said_sums[:same]
        for place, (message, reply) in enumerate(said[same:], start=same):
            told = (_json(message), None if reply is None else array("i", reply).tobytes())
            run("INSERT INTO message VALUES (?, ?, ?, ?)", (row.id, place, *told))
            said_sums.append(_sum(*told))
        row.pieces, row.mark_sums, row.said_sums = pieces, mark_sums, said_sums
        row.tokens, row.marks, row.said = len(c.tokens), list(c.marks), said
        named, keep_s = int(c.named), None if c.keep_alive_s is None else float(c.keep_alive_s)
        own = (self._model, c.tenant, c.id, c.engine_name, named, float(c.created_at), float(c.used_at), keep_s)
        self._describe(row, (*own, c.parent, c.asked, int(c.messages is not None)))

    def _describe(self, row: _Row, fields: tuple[Any, ...]) -> None:
        """Write the conversation's own row."""
        row.name, row.fields = fields[2], fields
        self._database.execute(f"UPDATE conversation SET {_OWN}, sum = ? WHERE id = ?", (*fields, row.sum, row.id))

    def _rename(self, conversation: Conversation) -> None:
        row = self._rows.get(conversation)
        if row is not None and row.fields and row.name != conversation.id:  # else its next turn writes all of it
            named = (conversation.id, row.fields[3], int(conversation.named))
            self._describe(row, (*row.fields[:2], *named, *row.fields[5:]))

    def _removed(self, conversation: Conversation) -> None:
        with self._writing(conversation):
            row = self._rows.pop(conversation, None)
            if row is not None:
                self._database.execute("DELETE FROM conversation WHERE id = ?", (row.id,))
                self._deleted_text = True

    def _added(self, response_id: str, stored: Stored) -> None:
        with self._writing(stored.conversation):
            row = self._rows.get(stored.conversation)
            if row is None:
                return  # its conversation could not be kept
            told = (int(stored.instructed), _json(stored.body))
            fields = (response_id, self._responses, row.id, stored.mark.length, *told)
            self._database.execute("INSERT INTO response VALUES (?, ?, ?, ?, ?, ?, ?)", (*fields, _sum(*fields)))
            self._responses += 1

    def _deleted(self, response_id: str) -> None:
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
                for other in self._rows.values():
                    other.name = ""  # what was renamed is named again with the next turn
                if conversation is not None:
                    self._rows.pop(conversation, None)
                    if before is not None:
                        self._rows[conversation] = _Row(before.id, "")

    def tidy(self) -> None:
        """Fold a write-ahead log that is long, or that holds deleted text, into the file; for a thread that nobody waits
        for, though a turn that ends meanwhile does."""
        with self._lock:
            try:
                log_bytes = os.path.getsize(f"{self.path}-wal")
                if self._deleted_text:
                    self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                    self._deleted_text = False
                elif log_bytes > _CHECKPOINT_PAGES * 4096:
                    self._database.execute("PRAGMA wal_checkpoint(PASSIVE)")
            except (sqlite3.Error, OSError) as error:
                log.error("%s cannot be tidied: %s", self.path, error)

    def close(self) -> None:
        with self._lock:
            self._database.close()


@dataclasses.dataclass(slots=True)
class _Row:
    """What the file has of a conversation. name: as it is there."""

    id: int
    name: str
    fields: tuple[Any, ...] = ()
    tokens: int = 0
    marks: list[Mark] = dataclasses.field(default_factory=list)
    said: list[_Said] = dataclasses.field(default_factory=list)
    pieces: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    mark_sums: list[int] = dataclasses.field(default_factory=list)
    said_sums: list[int] = dataclasses.field(default_factory=list)

    @property
    def sum(self) -> int:
        return _sum(self.id, self.fields, self.pieces, self.mark_sums, self.said_sums)


_UNREADABLE = (sqlite3.Error, ValueError, TypeError, KeyError, OverflowError, MemoryError)
"""What reading a damaged file raises; a text that is no UTF-8 any more is a ValueError."""


def _sum(*values: object) -> int:
    return zlib.crc32(repr(values).encode())


def _said(conversation: Conversation) -> list[_Said]:
    return [(message, conversation.replies.get(place)) for place, message in enumerate(conversation.messages or ())]


def _in_common(before: Sequence[object], now: Sequence[object]) -> int:
    """How many of the first are equal."""
    return next((i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), min(len(before), len(now)))


def _plain(turn: TurnRecord) -> dict[str, Any]:
    told = {name: getattr(turn, name) for name in _TURN_FIELDS}
    # Moments of a clock that ends with the process mean nothing to the next one.
    misses = [{**dataclasses.asdict(miss), "evicted_s": None} for miss in turn.misses]
    return {**told, "misses": misses}


def _turn(text: str) -> TurnRecord:
    told = json.loads(text)
    misses = tuple(Miss(**miss) for miss in told.pop("misses"))
    return TurnRecord(**{name: value for name, value in told.items() if name in _TURN_FIELDS}, misses=misses)


def _ids(blob: bytes) -> list[int]:
    ids = array("i")
    ids.frombytes(blob)
    return list(ids)


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
