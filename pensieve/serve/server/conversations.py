"""What a server knows of its conversations: their tokens, turns and stored responses; and which one a turn goes on from."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import math
import secrets
import threading
import time
import unicodedata
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from pensieve.core.request import Fork, TokenArray, text_of, tokens_of
from pensieve.core.session import common_prefix
from pensieve.errors import ConfigError, TooManySessions
from pensieve.serve.record import TurnRecord
from pensieve.serve.tokenizer import Message, plain_messages

if TYPE_CHECKING:
    from pensieve.serve.server.api import Turn
    from pensieve.serve.server.state import StateFile

LONGEST_NAME = 256
_TOKENS = attrgetter("tokens")
_LEAST_SHARED = 32  # tokens: below, a conversation of its own computes them as fast as it would find them
_NEIGHBOURS = 8  # on either side of where a prompt would be sorted in


@dataclass(frozen=True, slots=True)
class Mark:
    """A turn that stands. length: tokens of the conversation at its end, without one that only says so; messages: the same,
    with the reply, and key: their name, where they are known. asked: tokens before its own message. told: see told_of."""

    length: int
    asked: int
    told: dict[str, Any]
    messages: int = 0
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Said:
    """A conversation's tokens, from the first, and the messages that they say, where these are known."""

    tokens: TokenArray[int]
    messages: list[Message] | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """A response that its client may go on from. body: as it was sent. messages: how many of its conversation's there were,
    with its reply. instructed: the first one is the instructions of this response alone."""

    body: dict[str, Any]
    messages: int
    instructed: bool


@dataclass(slots=True, eq=False)
class Conversation:
    """What was said, its turns, and what is asked of it now. named: by its client, who expects to find it again; others are
    found by what was said. stored: responses by id, which somebody may want to go on from, so what stands is not replaced.
    One turn runs at a time; others wait.
    """

    tenant: str
    id: str
    named: bool
    created_at: float
    used_at: float
    tokens: TokenArray[int] = field(default_factory=lambda: array("i"))
    keep_alive_s: float | None = None
    marks: list[Mark] = field(default_factory=list)
    stored: dict[str, Stored] = field(default_factory=dict)
    computed: int = 0
    """Leading tokens that were computed; of a reply not the last token, nor what was encoded again at a stop string."""
    messages: list[Message] | None = None
    asked: int = 0
    running: Turn | None = None
    waiting: deque[Turn] = field(default_factory=deque)
    restored: bool = False
    """Read from the disk after a restart, and not asked since: the engine has nothing of it."""
    begun: bool = False
    """Some turn of it stands."""
    parent: str | None = None
    fork: Fork | None = None
    """How the engine is to begin it, until its first turn has started."""

    @property
    def engine_name(self) -> str:
        """What the engine calls it. Names of tenants have no stroke."""
        return f"{self.tenant}/{self.id}" if self.tenant else self.id

    @property
    def turns(self) -> list[Turn]:
        """Those that run or wait."""
        return [turn for turn in (self.running, *self.waiting) if turn is not None]

    @property
    def idle(self) -> bool:
        return self.running is None and not self.waiting

    def known(self, prompt: TokenArray[int]) -> int:
        """Leading tokens of the prompt that were computed before."""
        return min(common_prefix(self.tokens, prompt), self.computed)

    @property
    def claimed(self) -> int:
        """Tokens that have to stay as they are."""
        return self.marks[-1].length if self.stored and self.marks else 0


def session_name(name: object) -> str:
    """A name that a header and a path can carry, so that whoever begins a session can find and delete it. Raises ConfigError
    for any other."""
    said = text_of(name, "session_id")
    plain = said == said.strip() and not any(unicodedata.category(letter) in ("Cc", "Zl", "Zp") for letter in said)
    if not plain or not 0 < len(said) <= LONGEST_NAME or {".", ".."} & set(said.split("/")):
        raise ConfigError(
            f"session_id has 1 to {LONGEST_NAME} characters, no space at its ends, no line break or control character, and "
            "no . or .. between slashes: a header and a path have to carry it."
        )
    return said


def message_keys(messages: Sequence[Message], tools: object = None) -> list[str]:
    """Return for each message a key of it and all before it. tools: that the template shows with them."""
    said, keys = hashlib.blake2b(digest_size=16), []
    for value in (tools or None, *plain_messages(messages)):
        said.update(json.dumps(value, sort_keys=True).encode())
        keys.append(said.hexdigest())
    return keys[1:]


def _more(turn: Turn, held: Conversation, messages: list[Message]) -> Said:
    """What the conversation holds, and new messages."""
    if held.messages is not None or not held.tokens:
        return turn.asks([*(held.messages or ()), *messages])
    if len(messages) != 1 or messages[0].get("role") != "user":
        raise ConfigError(
            "This session holds raw text, so it takes one message of the user at a time, or a whole history."
        )
    following = turn.server.template.following(str(messages[0]["content"]), held.tokens[-1])
    return Said(held.tokens + array("i", following))


_TOLD = ("status", "finish_reason", "ttft_ms", "latency_ms", "queue_ms", "prompt_tokens", "output_tokens")


def told_of(turn: TurnRecord, moment: Callable[[float], float]) -> dict[str, Any]:
    """What clients are told of a turn that stands, as JSON. moment: a time of the engine's clock as seconds since 1970."""
    misses = [{**asdict(miss), "evicted_at": miss.evicted_s and moment(miss.evicted_s)} for miss in turn.misses]
    found = {"prompt_tokens_details": prompt_details(turn), "misses": misses}
    return {**{name: getattr(turn, name) for name in _TOLD}, **found}


def prompt_details(turn: TurnRecord) -> dict[str, int]:
    """KV that another conversation had left counts as found, though it was new here."""
    shared, disk = turn.shared_hit_tokens or 0, turn.disk_hit_tokens or 0
    gpu, cpu = (turn.gpu_hit_tokens or 0) + shared, turn.cpu_hit_tokens or 0
    return {
        "cached_tokens": gpu + cpu + disk,
        "gpu": gpu,
        "cpu": cpu,
        "disk": disk,
        "recomputed": turn.recomputed_tokens or 0,
        "new": (turn.new_tokens or 0) - shared,
    }


@dataclass(slots=True)
class _Tenant:
    """What one tenant has. all: by id. ordered: the same by their tokens. by_key: whose turn ended with the messages of that
    name, and the mark of its end. responses: whose they are, by id, the oldest first."""

    all: dict[str, Conversation] = field(default_factory=dict)
    ordered: list[Conversation] = field(default_factory=list)
    by_key: dict[str, tuple[Conversation, Mark]] = field(default_factory=dict)
    responses: dict[str, Conversation] = field(default_factory=dict)

    def add(self, conversation: Conversation) -> None:
        assert conversation.id not in self.all
        self.all[conversation.id] = conversation
        bisect.insort_right(self.ordered, conversation, key=_TOKENS)

    def replace(self, conversation: Conversation, tokens: TokenArray[int]) -> None:
        self._out_of_order(conversation)
        conversation.tokens = tokens
        bisect.insort_right(self.ordered, conversation, key=_TOKENS)

    def drop(self, conversation: Conversation) -> None:
        del self.all[conversation.id]
        self._out_of_order(conversation)
        self.forget_marks(conversation, -1)

    def forget_marks(self, conversation: Conversation, kept: int) -> None:
        """Drop the keys of turns whose tokens are replaced. The key of a turn that a fork took over stays the fork's."""
        for mark in conversation.marks:
            if mark.length > kept and mark.key is not None and self.by_key.get(mark.key, (None,))[0] is conversation:
                del self.by_key[mark.key]
        conversation.marks = [mark for mark in conversation.marks if mark.length <= kept]

    def _out_of_order(self, conversation: Conversation) -> None:
        place = bisect.bisect_left(self.ordered, conversation.tokens, key=_TOKENS)
        while self.ordered[place] is not conversation:
            place += 1
        del self.ordered[place]


class Conversations:
    """Thread-safe by `lock`, which callers hold over what must happen at once. released: told of each conversation that is
    given up."""

    def __init__(self, released: Callable[[Conversation], None]) -> None:
        self.lock = threading.RLock()
        self._released = released
        self.most = math.inf
        """Conversations that a tenant may have, and stored responses. Beyond, the unnamed one idle longest makes room, or the
        oldest response."""
        self.keep_alive_s: float | None = None
        """Of those that say nothing else; None: for ever."""
        self._tenants: defaultdict[str, _Tenant] = defaultdict(_Tenant)
        self.keeper: StateFile | None = None
        """Who hears of all that outlives a turn."""

    # -- look up ------------------------------------------------------------------------------------------------------

    def find(self, tenant: str, name: str) -> Conversation | None:
        with self.lock:
            return self._tenants[tenant].all.get(name)

    def of(self, tenant: str) -> list[Conversation]:
        with self.lock:
            return list(self._tenants[tenant].all.values())

    def __iter__(self) -> Iterator[Conversation]:
        with self.lock:
            return iter([one for tenant in self._tenants.values() for one in tenant.all.values()])

    def __len__(self) -> int:
        with self.lock:
            return sum(len(tenant.all) for tenant in self._tenants.values())

    def by_messages(self, tenant: str, keys: Sequence[str]) -> tuple[Conversation, Mark] | None:
        """The conversation of which a turn ended with these messages, the most of them, and the mark of that turn."""
        with self.lock:
            known = self._tenants[tenant].by_key
            return next((known[key] for key in reversed(keys) if key in known), None)

    def by_tokens(self, tenant: str, prompt: TokenArray[int]) -> tuple[Conversation, int] | None:
        """The conversation that shares the longest prefix with the prompt, and its length; of equals one that is a prefix of
        it wholly. Sorted by tokens, it stands beside the prompt."""
        best: tuple[Conversation, int] | None = None
        with self.lock:
            ordered = self._tenants[tenant].ordered
            place = bisect.bisect_right(ordered, prompt, key=_TOKENS)
            for neighbour in (*reversed(ordered[max(0, place - _NEIGHBOURS) : place]), *ordered[place : place + 1]):
                shared = common_prefix(neighbour.tokens, prompt)
                whole = shared == len(neighbour.tokens)
                if shared and (best is None or (shared, whole) > (best[1], best[1] == len(best[0].tokens))):
                    best = neighbour, shared
        return best

    # -- begin --------------------------------------------------------------------------------------------------------

    def open(self, tenant: str, name: str | None = None) -> Conversation:
        """A new conversation. Raises TooManySessions where the tenant has as many as it may, all of them named or busy."""
        with self.lock:
            self._make_room(tenant)
            now = time.time()
            made = Conversation(tenant, name or f"conv_{secrets.token_hex(8)}", name is not None, now, now)
            self._tenants[tenant].add(made)
            return made

    def fork(self, parent: Conversation, keep: int) -> Conversation:
        """A new conversation that begins with the first `keep` tokens of this one. Its KV goes along where the last turn is
        asked differently, or again: the old reply is then rarely gone on from."""
        with self.lock:
            child = self.open(parent.tenant)
            self._tenants[parent.tenant].replace(child, parent.tokens[:keep])
            child.computed = min(parent.computed, max(keep - 1, 0))
            child.marks = [mark for mark in parent.marks if mark.length <= keep]
            if parent.messages is not None:
                child.messages = parent.messages[: child.marks[-1].messages if child.marks else 0]
            child.keep_alive_s, child.restored = parent.keep_alive_s, parent.restored
            child.parent, child.asked = parent.id, len(child.marks)
            if not parent.restored:  # else the engine has nothing of it
                last = parent.marks[-1].asked if parent.marks else 0
                child.fork = Fork(parent.engine_name, keep, takes_kv=parent.idle and keep >= last)
            return child

    # -- which one a turn goes on from ----------------------------------------------------------------------------------

    def chat(
        self, turn: Turn, tenant: str, name: str | None, messages: list[Message], whole: bool | None = None
    ) -> None:
        """Begin a turn with these messages. name: of the conversation; None: the one that began with them, or a new one.
        whole: they are the whole history; None: if the assistant speaks in them, or if they come without a name."""
        if name is None:
            known = self.by_messages(tenant, message_keys(messages, turn.tools))
            if known is None:
                self._nearest(turn, tenant, turn.asks(messages))
            else:
                conversation, mark = known
                own = (conversation.messages or [])[: mark.messages]
                self._go_on(turn, conversation, mark, turn.asks([*own, *messages[len(own) :]]))
            return
        if whole is None:
            whole = any(message.get("role") == "assistant" for message in messages)
        with self.lock:
            conversation = self._named(tenant, name)
            if whole:
                own = conversation.messages or []
                told = zip(plain_messages(own), messages, strict=False)
                same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], told))
                asked = turn.asks([*own[:same], *messages[same:]])
                turn.begin(self._unclaimed(conversation, asked), asked)
            else:
                turn.begin(conversation, lambda held: _more(turn, held, messages))

    def _go_on(self, turn: Turn, conversation: Conversation, mark: Mark, asked: Said) -> None:
        """Go on from a mark."""
        with self.lock:
            if self.find(conversation.tenant, conversation.id) is not conversation:  # it is gone
                self._nearest(turn, conversation.tenant, asked)
                return
            last = bool(conversation.marks) and conversation.marks[-1] is mark
            shared = common_prefix(conversation.tokens, asked.tokens)
            if not (conversation.idle and last and shared >= conversation.claimed):
                conversation = self.fork(conversation, shared)
            turn.begin(conversation, asked)

    def complete(self, turn: Turn, tenant: str, name: str | None, prompt: str | Sequence[int], whole: bool) -> None:
        """Begin a turn with a prompt without roles. With a name it is appended to what the conversation holds, unless it is
        all of it."""
        server = turn.server
        if isinstance(prompt, str):
            begin = array("i", server.tokenizer.begin)
            ids = array("i", server.tokenizer.encode(text_of(prompt, "prompt")))
        else:
            begin, ids = array("i"), tokens_of(prompt, server.vocab)
        asked = Said(begin + ids)
        if name is None:
            self._nearest(turn, tenant, asked)
            return
        with self.lock:
            conversation = self._named(tenant, name)
            if whole:
                turn.begin(self._unclaimed(conversation, asked), asked)
            else:
                turn.begin(conversation, lambda held: Said((held.tokens or begin) + ids))

    def _named(self, tenant: str, name: str) -> Conversation:
        return self.find(tenant, session_name(name)) or self.open(tenant, name)

    def _unclaimed(self, conversation: Conversation, asked: Said) -> Conversation:
        """The conversation, or a fork where this prompt leaves it before what has to stay."""
        shared = common_prefix(conversation.tokens, asked.tokens)
        leaves = conversation.idle and shared < conversation.claimed
        return self.fork(conversation, shared) if leaves else conversation

    def _nearest(self, turn: Turn, tenant: str, asked: Said) -> None:
        """In the conversation that the prompt goes on from, a fork of the one that shares most with it, or a new one."""
        with self.lock:
            conversation, shared = self.by_tokens(tenant, asked.tokens) or (None, 0)
            if conversation is None or not (conversation.idle and shared == len(conversation.tokens)):
                if conversation is not None and shared >= _LEAST_SHARED:
                    conversation = self.fork(conversation, shared)
                else:
                    conversation = self.open(tenant)
            turn.begin(conversation, asked)

    # -- progress -----------------------------------------------------------------------------------------------------

    def settle(self, conversation: Conversation, said: Said, mark: Mark, computed: int) -> None:
        """Record a turn that stands: what the conversation holds now, the mark of its end, and how many leading tokens were
        computed."""
        with self.lock:
            tenant, kept = self._tenants[conversation.tenant], common_prefix(conversation.tokens, said.tokens)
            if kept < len(conversation.tokens):
                tenant.forget_marks(conversation, kept)
            tenant.replace(conversation, said.tokens)
            conversation.marks.append(mark)
            conversation.computed, conversation.messages = computed, said.messages
            if mark.key is not None:
                tenant.by_key[mark.key] = conversation, mark
            conversation.used_at = time.time()
            conversation.restored, conversation.begun = False, True
            self._write(conversation)

    def restore(self, conversation: Conversation) -> None:
        """Add a conversation as it was before the server was started again. Where two begin alike, the first one restored
        is the one that is found by what both said."""
        with self.lock:
            tenant = self._tenants[conversation.tenant]
            tenant.add(conversation)
            tenant.responses |= dict.fromkeys(conversation.stored, conversation)
            for mark in conversation.marks:
                if mark.key is not None:
                    tenant.by_key.setdefault(mark.key, (conversation, mark))
            conversation.restored = conversation.begun = True
            conversation.computed = max(len(conversation.tokens) - 1, 0)

    # -- responses ----------------------------------------------------------------------------------------------------

    def store(self, conversation: Conversation, response_id: str, stored: Stored) -> None:
        """What its conversation holds is not replaced from now on. Their KV stays in the cache as any other."""
        with self.lock:
            mine = self._tenants[conversation.tenant].responses
            oldest = next(iter(mine)) if len(mine) >= self.most else None
            mine[response_id] = conversation
            conversation.stored[response_id] = stored
            self._write(conversation)
        if oldest is not None:
            self.unstore(conversation.tenant, oldest)

    def response(self, tenant: str, response_id: str) -> tuple[Conversation, Stored] | None:
        """With the conversation that it is of."""
        with self.lock:
            owner = self._tenants[tenant].responses.get(response_id)
            return None if owner is None else (owner, owner.stored[response_id])

    def unstore(self, tenant: str, response_id: str) -> bool:
        """Delete a stored response. Its conversation goes with the last response that claims it, unless it has a name."""
        with self.lock:
            owner = self._tenants[tenant].responses.pop(response_id, None)
            if owner is None:
                return False
            del owner.stored[response_id]
            self.give_up(owner)
            self._write(owner)
        return True

    def give_up(self, conversation: Conversation) -> None:
        """Remove a conversation that no stored response claims, unless it has a name or is busy."""
        with self.lock:
            if not conversation.stored and conversation.idle and not conversation.named:
                self.remove(conversation)

    # -- end ----------------------------------------------------------------------------------------------------------

    def remove(self, conversation: Conversation) -> None:
        """Give up an idle conversation: its tokens here, its KV in the engine."""
        with self.lock:
            if self.find(conversation.tenant, conversation.id) is not conversation:
                return
            assert conversation.idle
            self._tenants[conversation.tenant].drop(conversation)
        self._released(conversation)
        if self.keeper is not None:
            self.keeper.removed(conversation)

    def expire(self) -> None:
        """Give up those that were idle for longer than their keep_alive_s."""
        with self.lock:
            now = time.time()
            for conversation in self:
                keep_s = self.keep_alive_s if conversation.keep_alive_s is None else conversation.keep_alive_s
                if keep_s is not None and conversation.idle and now - conversation.used_at > keep_s:
                    self.remove(conversation)

    def clear(self) -> None:
        """Give up all that are idle."""
        with self.lock:
            for conversation in self:
                if conversation.idle:
                    self.remove(conversation)

    def _write(self, conversation: Conversation) -> None:
        """In the order of what happens: under the lock."""
        if self.keeper is not None and self.find(conversation.tenant, conversation.id) is conversation:
            self.keeper.settled(conversation)

    def _make_room(self, tenant: str) -> None:
        mine = self._tenants[tenant].all
        if len(mine) >= self.most:
            spare = [one for one in mine.values() if one.idle and not one.named and not one.stored]
            if not spare:
                raise TooManySessions(
                    f"There are {len(mine)} sessions, which is all there may be; delete some (DELETE /v1/sessions/ID), or "
                    "wait until one has expired."
                )
            self.remove(min(spare, key=lambda one: one.used_at))
