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
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from pensieve.core.request import Fork, TokenArray, text_of, tokens_of
from pensieve.core.session import common_prefix
from pensieve.errors import ConfigError, TooManySessions
from pensieve.serve.record import Transcript, TurnRecord

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
    with the reply, and key: their name, where they are known. asked: tokens before its own message."""

    length: int
    turn: TurnRecord
    asked: int
    messages: int = 0
    key: bytes | None = None


@dataclass(slots=True, eq=False)
class Conversation(Transcript):
    """A transcript, its turns, and what is asked of it now. named: by its client, who expects to find it again; others are
    found by what was said. claims: lengths at which somebody may want to go on (responses that were stored), so tokens below
    the largest are not replaced. One turn runs at a time; others wait.
    """

    tenant: str
    id: str
    named: bool
    created_at: float
    used_at: float
    keep_alive_s: float | None = None
    marks: list[Mark] = field(default_factory=list)
    claims: Counter[int] = field(default_factory=Counter)
    computed: int = 0
    """Leading tokens that were computed; of a reply not the last token, nor what was encoded again at a stop string."""
    messages: list[Message] | None = None
    replies: dict[int, list[int]] = field(default_factory=dict)
    """The model's own tokens of messages that it said, by their place."""
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

    def first_replies(self, messages: int) -> dict[int, list[int]]:
        """The model's own tokens of what it said in the first so many messages."""
        return {place: ids for place, ids in list(self.replies.items()) if place < messages}

    def claimed(self) -> int:
        """Tokens that have to stay as they are."""
        return max((length for length, count in self.claims.items() if count), default=0)


Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a turn asks. prompt: all tokens, from the conversation's first. messages: what they say, where it is known;
    replies: the model's own tokens of some of them, by place."""

    prompt: TokenArray[int]
    messages: list[Message] | None = None
    replies: dict[int, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class Stored:
    """A response that its client may go on from. body: as it was sent. instructed: the conversation's first message is the
    instructions of this response alone."""

    body: dict[str, Any]
    conversation: Conversation
    mark: Mark
    instructed: bool


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


def message_keys(messages: Sequence[Message], tools: object = None) -> list[bytes]:
    """Return for each message a key of it and all before it. tools: that the template shows with them."""
    said, keys = hashlib.blake2b(digest_size=16), []
    for value in (tools or None, *messages):
        said.update(json.dumps(value, sort_keys=True).encode())
        keys.append(said.digest())
    return keys[1:]


def _more(turn: Turn, held: Conversation, messages: list[Message]) -> Asked:
    """What the conversation holds, and new messages."""
    if held.messages is not None or not held.tokens:
        return turn.asks([*(held.messages or ()), *messages], dict(held.replies))
    if len(messages) != 1 or messages[0].get("role") != "user":
        raise ConfigError(
            "This session holds raw text, so it takes one message of the user at a time, or a whole history."
        )
    following = turn.server.template.following(str(messages[0]["content"]), held.tokens[-1])
    return Asked(held.tokens + array("i", following))


class Conversations:
    """Thread-safe by `lock`, which callers hold over what must happen at once. released: told of each conversation that is
    given up."""

    def __init__(self, released: Callable[[Conversation], None], now: Callable[[], float] = time.time) -> None:
        self.lock = threading.RLock()
        self._released, self._now = released, now
        self._most, self._keep_alive_s = math.inf, math.inf
        self._all: dict[str, dict[str, Conversation]] = {}  # by tenant and id
        self._sorted: dict[str, list[Conversation]] = {}  # of each tenant, by tokens
        self._by_key: dict[tuple[str, bytes], tuple[Conversation, int]] = {}
        self._responses: dict[str, dict[str, Stored]] = {}  # by tenant and id, the oldest first
        self.keeper: StateFile | None = None
        """Who hears of all that outlives a turn."""

    def limit(self, most: int, keep_alive_s: float | None) -> None:
        """most: conversations that a tenant may have, and stored responses. Beyond, the unnamed one idle longest makes room,
        or the oldest response. keep_alive_s: of those that say nothing else; None: for ever."""
        self._most, self._keep_alive_s = most, math.inf if keep_alive_s is None else keep_alive_s

    # -- look up ------------------------------------------------------------------------------------------------------

    def find(self, tenant: str, name: str) -> Conversation | None:
        with self.lock:
            return self._all.get(tenant, {}).get(name)

    def of(self, tenant: str) -> list[Conversation]:
        with self.lock:
            return list(self._all.get(tenant, {}).values())

    def __iter__(self) -> Iterator[Conversation]:
        with self.lock:
            return iter([one for known in self._all.values() for one in known.values()])

    def __len__(self) -> int:
        with self.lock:
            return sum(map(len, self._all.values()))

    def by_messages(self, tenant: str, keys: Sequence[bytes]) -> tuple[Conversation, Mark] | None:
        """The conversation of which a turn ended with these messages, the most of them, and the mark of that turn."""
        with self.lock:
            for key in reversed(keys):
                if (known := self._by_key.get((tenant, key))) is not None:
                    return known[0], known[0].marks[known[1]]
        return None

    def by_tokens(self, tenant: str, prompt: TokenArray[int]) -> tuple[Conversation, int] | None:
        """The conversation that shares the longest prefix with the prompt, and its length; of equals one that is a prefix of
        it wholly. Sorted by tokens, it stands beside the prompt."""
        best: tuple[Conversation, int] | None = None
        with self.lock:
            ordered = self._sorted.get(tenant, [])
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
            known = self._all.setdefault(tenant, {})
            chosen = name or f"conv_{secrets.token_hex(8)}"
            assert chosen not in known
            now = self._now()
            made = Conversation(tenant, chosen, name is not None, now, now)
            known[chosen] = made
            bisect.insort_right(self._sorted.setdefault(tenant, []), made, key=_TOKENS)
            return made

    def fork(self, parent: Conversation, keep: int) -> Conversation:
        """A new conversation that begins with the first `keep` tokens of this one. Its KV goes along where the last turn is
        asked differently, or again: the old reply is then rarely gone on from."""
        with self.lock:
            child = self.open(parent.tenant)
            self._replace(child, parent.tokens[:keep])
            child.computed = min(parent.computed, max(keep - 1, 0))
            child.marks = [mark for mark in parent.marks if mark.length <= keep]
            if parent.messages is not None:
                said = child.marks[-1].messages if child.marks else 0
                child.messages = parent.messages[:said]
                child.replies = parent.first_replies(said)
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
                self.go_on(turn, *known, messages, known[0].first_replies(known[1].messages))
            return
        if whole is None:
            whole = any(message.get("role") == "assistant" for message in messages)
        with self.lock:
            conversation = self._named(tenant, name)
            if whole:
                pairs = enumerate(zip(messages, conversation.messages or (), strict=False))
                same = sum(1 for _ in itertools.takewhile(lambda pair: pair[1][0] == pair[1][1], pairs))
                asked = turn.asks(messages, conversation.first_replies(same))
                turn.begin(self._unclaimed(conversation, asked), asked)
            else:
                turn.begin(conversation, lambda held: _more(turn, held, messages))

    def go_on(
        self, turn: Turn, conversation: Conversation, mark: Mark, messages: list[Message], replies: dict[int, list[int]]
    ) -> None:
        """Go on from a mark with these messages, the whole history; replies: the model's own tokens of some of them."""
        asked = turn.asks(messages, replies)
        with self.lock:
            if self.find(conversation.tenant, conversation.id) is not conversation:  # it is gone
                turn.begin(self.open(conversation.tenant), asked)
                return
            last = bool(conversation.marks) and conversation.marks[-1] is mark
            shared = common_prefix(conversation.tokens, asked.prompt)
            if not (conversation.idle and last and shared >= conversation.claimed()):
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
        asked = Asked(begin + ids)
        if name is None:
            self._nearest(turn, tenant, asked, prompt if isinstance(prompt, str) else None)
            return
        with self.lock:
            conversation = self._named(tenant, name)
            if whole:
                turn.begin(self._unclaimed(conversation, asked), asked)
            else:
                turn.begin(conversation, lambda held: Asked((held.tokens or begin) + ids))

    def _named(self, tenant: str, name: str) -> Conversation:
        return self.find(tenant, session_name(name)) or self.open(tenant, name)

    def _unclaimed(self, conversation: Conversation, asked: Asked) -> Conversation:
        """The conversation, or a fork where this prompt leaves it before what has to stay."""
        shared = common_prefix(conversation.tokens, asked.prompt)
        leaves = conversation.idle and shared < conversation.claimed()
        return self.fork(conversation, shared) if leaves else conversation

    def _nearest(self, turn: Turn, tenant: str, asked: Asked, text: str | None = None) -> None:
        """In the conversation that the prompt goes on from, a fork of the one that shares most with it, or a new one."""
        with self.lock:
            conversation, shared = self.by_tokens(tenant, asked.prompt) or (None, 0)
            if conversation is not None and text is not None and _LEAST_SHARED <= shared < len(conversation.tokens):
                # A text may begin with all that was said and still encode to other tokens: then those said are taken.
                said = turn.server.tokenizer.decode(conversation.tokens)
                if said and text.startswith(said):
                    shared = len(conversation.tokens)
                    rest = array("i", turn.server.tokenizer.encode(text[len(said) :]))
                    asked = Asked(conversation.tokens + rest)
            if conversation is None or not (conversation.idle and shared == len(conversation.tokens)):
                if conversation is not None and shared >= _LEAST_SHARED:
                    conversation = self.fork(conversation, shared)
                else:
                    conversation = self.open(tenant)
            turn.begin(conversation, asked)

    # -- progress -----------------------------------------------------------------------------------------------------

    def settle(
        self,
        conversation: Conversation,
        tokens: TokenArray[int],
        mark: Mark,
        computed: int = 0,
        messages: list[Message] | None = None,
        replies: dict[int, list[int]] | None = None,
    ) -> None:
        """Record a turn that stands: what the conversation holds now, the mark of its end, and how many leading tokens were
        computed."""
        with self.lock:
            kept = common_prefix(conversation.tokens, tokens)
            if kept < len(conversation.tokens):
                self._forget_marks(conversation, kept)
            self._replace(conversation, tokens)
            conversation.marks.append(mark)
            conversation.computed = computed
            conversation.messages, conversation.replies = messages, replies or {}
            if mark.key is not None:
                self._by_key[conversation.tenant, mark.key] = conversation, len(conversation.marks) - 1
            conversation.used_at = self._now()
            conversation.restored, conversation.begun = False, True
        if self.keeper is not None:
            self.keeper.settled(conversation)

    def restore(self, conversation: Conversation) -> None:
        """Add a conversation as it was before the server was started again. Where two begin alike, the first one restored
        is the one that is found by what both said."""
        with self.lock:
            known = self._all.setdefault(conversation.tenant, {})
            known[conversation.id] = conversation
            bisect.insort_right(self._sorted.setdefault(conversation.tenant, []), conversation, key=_TOKENS)
            for place, mark in enumerate(conversation.marks):
                if mark.key is not None:
                    self._by_key.setdefault((conversation.tenant, mark.key), (conversation, place))
            conversation.restored = conversation.begun = True
            conversation.computed = max(len(conversation.tokens) - 1, 0)

    def _forget_marks(self, conversation: Conversation, kept: int) -> None:
        """Drop the keys of turns whose tokens are replaced. The key of a turn that a fork took over stays the fork's."""
        for place, mark in enumerate(conversation.marks):
            if mark.length > kept and mark.key is not None:
                known = self._by_key.get((conversation.tenant, mark.key))
                if known == (conversation, place):
                    del self._by_key[conversation.tenant, mark.key]
        conversation.marks = [mark for mark in conversation.marks if mark.length <= kept]

    def _replace(self, conversation: Conversation, tokens: TokenArray[int]) -> None:
        ordered = self._sorted[conversation.tenant]
        del ordered[self._place(ordered, conversation)]
        conversation.tokens = tokens
        bisect.insort_right(ordered, conversation, key=_TOKENS)

    @staticmethod
    def _place(ordered: list[Conversation], conversation: Conversation) -> int:
        place = bisect.bisect_left(ordered, conversation.tokens, key=_TOKENS)
        while ordered[place] is not conversation:
            place += 1
        return place

    # -- responses ----------------------------------------------------------------------------------------------------

    def store(self, response_id: str, stored: Stored) -> None:
        """Tokens of its conversation up to its end are not replaced from now on. Their KV stays in the cache as any other."""
        tenant = stored.conversation.tenant
        with self.lock:
            mine = self._responses.setdefault(tenant, {})
            oldest = next(iter(mine)) if len(mine) >= self._most else None
            mine[response_id] = stored
            stored.conversation.claims[stored.mark.length] += 1
        if self.keeper is not None:
            self.keeper.stored(response_id, stored)
        if oldest is not None:
            self.unstore(tenant, oldest)

    def response(self, tenant: str, response_id: str) -> Stored | None:
        with self.lock:
            return self._responses.get(tenant, {}).get(response_id)

    def unstore(self, tenant: str, response_id: str) -> bool:
        """Delete a stored response. Its conversation goes with the last response that claims it, unless it has a name."""
        with self.lock:
            stored = self._responses.get(tenant, {}).pop(response_id, None)
            if stored is None:
                return False
            stored.conversation.claims[stored.mark.length] -= 1
            self.give_up(stored.conversation)
        if self.keeper is not None:
            self.keeper.unstored(response_id)
        return True

    def give_up(self, conversation: Conversation) -> None:
        """Remove a conversation that no stored response claims, unless it has a name or is busy."""
        with self.lock:
            if not conversation.claimed() and conversation.idle and not conversation.named:
                self.remove(conversation)

    # -- end ----------------------------------------------------------------------------------------------------------

    def remove(self, conversation: Conversation) -> None:
        """Give up an idle conversation: its tokens here, its KV in the engine."""
        with self.lock:
            known = self._all.get(conversation.tenant, {})
            if known.get(conversation.id) is not conversation:
                return
            assert conversation.idle
            del known[conversation.id]
            ordered = self._sorted[conversation.tenant]
            del ordered[self._place(ordered, conversation)]
            self._forget_marks(conversation, -1)
            if not known:
                del self._all[conversation.tenant], self._sorted[conversation.tenant]
        self._released(conversation)
        if self.keeper is not None:
            self.keeper.removed(conversation)

    def expire(self) -> None:
        """Give up those that were idle for longer than their keep_alive_s."""
        with self.lock:
            now = self._now()
            for conversation in self:
                keep_s = self._keep_alive_s if conversation.keep_alive_s is None else conversation.keep_alive_s
                if conversation.idle and now - conversation.used_at > keep_s:
                    self.remove(conversation)

    def clear(self) -> None:
        """Give up all that are idle."""
        with self.lock:
            for conversation in self:
                if conversation.idle:
                    self.remove(conversation)

    def _make_room(self, tenant: str) -> None:
        mine = self._all.get(tenant, {})
        if len(mine) >= self._most:
            spare = [one for one in mine.values() if one.idle and not one.named and not one.claimed()]
            if not spare:
                raise TooManySessions(
                    f"There are {len(mine)} sessions, which is all there may be; delete some (DELETE /v1/sessions/ID), or "
                    "wait until one has expired."
                )
            self.remove(min(spare, key=lambda one: one.used_at))
