"""Why prompt tokens of recorded traffic were not found: each missed position of each prompt has one cause.

The lengths that a cache could have found of a prompt are nested: what the engine found, what was written in time on this
replica, what was ever sent to this replica, what was ever sent at all. A prompt's missed positions are divided at these
lengths, so that the causes of a prompt add up to what it missed, position by position.

Blocks are nodes of a prefix tree, so that two prompts share a node only where all before it is equal too.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pensieve.lab.bound import Idle, most_kept
from pensieve.lab.traffic.table import Exchange, Facts, ends_of
from pensieve.lab.workload.formats.traffic import prompt_tokens
from pensieve.serve.books.books import PositionPrices

Cause = Literal["never", "edited", "answer", "routed", "late", "capacity", "order"]
CAUSES: dict[Cause, str] = {
    "never": "never seen",  # behind all that was ever sent before
    "edited": "edited prompt or template",  # a returning conversation sends other tokens where it had sent some before
    "answer": "answer sent back",  # of a reply without hashes: nobody knows whether these are the same tokens
    "routed": "routed to another replica",  # sent before, and only to other replicas
    "late": "written too late or not at all",  # sent before, and not yet written; and less than a block
    "capacity": "capacity",  # written in time, and beyond what the offline bound finds with this much memory
    "order": "order of eviction",  # what the offline bound finds with this much memory and the engine did not
}
"""Their names; docs/advise.md says how each is computed."""
Ids = NDArray[np.int64]
Times = NDArray[np.float64]
ROOT = -1


@dataclass(slots=True)
class Sent:
    """A request as it was recorded, and where its prompt could have been found. turn: its number in its conversation. found:
    by the engine; None: it does not say.

    in_time, here, ever: leading tokens that had been written on its replica by then, sent there, sent anywhere. edge: where
    it differs from what its conversation had sent before; None: nowhere. before: how much that was, its reply with it where
    replies are hashed. answered: that prompt and its reply. pause_s: since that reply; None: a first request. uses: the
    leading tokens by the request that used them last: (its place, start, stop).
    """

    session: str
    turn: int
    at_s: float
    end_s: float
    prompt: int
    reply: int
    found: int | None
    in_time: int = 0
    here: int = 0
    ever: int = 0
    edge: int | None = None
    before: int = 0
    answered: int = 0
    pause_s: float | None = None
    uses: Sequence[tuple[int, int, int]] = ()


class Reading:
    """Where each prompt could have been found. exchanges: in order of arrival, each with the name of its conversation. named:
    the source says which requests are one; if not, an edited prompt looks like another conversation.

    sent: in order of arrival. unique_tokens: of all different blocks. unknown: how many requests lack what; those without a
    time, a length or hashes are left out. edges: how many conversations differ first at that position from what they had
    sent. shortened: requests that came back with less than their conversation's prompt and reply.
    """

    def __init__(self, facts: Facts, exchanges: Iterable[tuple[Exchange, str]], named: bool = True) -> None:
        self.facts, self.named = facts, named
        self.sent: list[Sent] = []
        self.unique_tokens = self.shortened = 0
        self.unknown, self.edges = Counter[str](), Counter[int]()
        self.tenants: set[str | None] = set()
        self._edited: set[str] = set()
        self._latest: dict[str, tuple[Ids, Ids, Ids, Sent]] = {}  # hashes of full blocks, nodes, ends, the request
        # Of blocks, which are nodes of a prefix tree, numbered in the order in which they were first sent:
        self._children: dict[tuple[int, int], int] = {}
        self._last_user = np.full(1024, -1, dtype=np.int64)
        self._written_s: dict[str, Times] = {}  # by replica: when its KV was there, inf: never
        for one, name in exchanges:
            self._add(one, name)
        self.replicas = len(self._written_s.keys() - {""})

    @property
    def sessions(self) -> int:
        return len({one.session for one in self.sent})

    @property
    def returning(self) -> int:
        """Conversations of several requests."""
        return len({one.session for one in self.sent if one.pause_s is not None})

    def _walk(self, root: int, hashes: Iterable[int]) -> Ids:
        """The nodes of a chain that goes on from `root`."""
        children, found, at = self._children, [], root
        for one in hashes:
            at = children.setdefault((at, one), len(children))
            found.append(at)
        if (more := 2 * len(children) - len(self._last_user)) > len(children):
            self._last_user = np.pad(self._last_user, (0, more), constant_values=-1)
        return np.array(found, dtype=np.int64)

    def _written(self, replica: str) -> Times:
        known = self._written_s.get(replica, np.empty(0))
        if (more := len(self._last_user) - len(known)) > 0:
            known = self._written_s[replica] = np.pad(known, (0, more), constant_values=np.inf)
        return known

    def _add(self, one: Exchange, name: str) -> None:
        unknown, prompt = self.unknown, prompt_tokens(one, self.facts)
        if one.arrival_s is None or one.blocks is None or not prompt:
            unknown["a time, a length or hashes, and are left out"] += 1
            return
        unknown["an end"] += one.end_s is None
        unknown["a first token"] += one.first_token_s is None
        unknown["what the engine found"] += one.cached_tokens is None
        replica, place, at_s = one.replica or "", len(self.sent), one.arrival_s
        self.tenants.add(one.tenant)
        hashes = np.array(one.blocks, dtype=np.int64)
        (path, same), ends = self._path(hashes, name), ends_of(one, self.facts)
        full = int(np.searchsorted(ends, prompt, side="right"))
        usable = int(np.searchsorted(ends, prompt - 1, side="right"))  # every engine computes the last token
        first_s = at_s if one.first_token_s is None else max(at_s, one.first_token_s)
        end_s = first_s if one.end_s is None else max(first_s, one.end_s)
        found = None if one.cached_tokens is None else min(max(one.cached_tokens, 0), prompt - 1)
        turn = 1 + self._latest[name][3].turn if name in self._latest else 1
        sent = Sent(name, turn, at_s, end_s, prompt, one.output_tokens or 0, found)
        written, users = self._written(replica), self._last_user[path]
        self.unique_tokens += int(np.diff(ends, prepend=0)[users < 0].sum())
        known = path[:usable]
        ever = int((users[:usable] >= 0).sum())
        counts = int((written[known] <= at_s).sum()), int((written[known] < np.inf).sum()), ever
        sent.in_time, sent.here, sent.ever = (int(ends[count - 1]) if count else 0 for count in counts)
        cuts = [0, *(np.flatnonzero(np.diff(users[:ever])) + 1).tolist(), ever] if ever else []
        sent.uses = [(int(users[i]), int(ends[i - 1]) if i else 0, int(ends[j - 1])) for i, j in pairwise(cuts)]
        own, own_ends, hashes = path[:full], ends[:full], hashes[:full]
        if name in self._latest:
            self._compare(sent, same, min(len(self._latest[name][1]), full), *self._latest[name][2:])
        self._write(path, replica, first_s, place)
        if one.output_blocks:
            out = self._walk(int(own[-1]) if full else ROOT, one.output_blocks)
            size = self.facts.block_tokens or 0.0
            self.unique_tokens += int(size * (self._last_user[out] < 0).sum())
            self._write(out, replica, end_s, place)
            own, hashes = np.append(own, out), np.append(hashes, np.array(one.output_blocks, dtype=np.int64))
            own_ends = np.append(own_ends, (size * np.arange(full + 1, len(own) + 1)).astype(np.int64))
        elif one.output_tokens:
            unknown["hashes of the reply"] += 1
        self._latest[name] = (hashes, own, own_ends, sent)
        self.sent.append(sent)

    def _path(self, hashes: Ids, name: str) -> tuple[Ids, int]:
        """Its nodes, and how many of them its conversation had sent before: these need not be walked."""
        if name not in self._latest:
            return self._walk(ROOT, hashes.tolist()), 0
        old, known, _, _ = self._latest[name]
        both = min(len(old), len(hashes))
        differs = np.flatnonzero(old[:both] != hashes[:both])
        same = int(differs[0]) if len(differs) else both
        rest = self._walk(int(known[same - 1]) if same else ROOT, hashes[same:].tolist())
        return np.append(known[:same], rest), same

    def _write(self, path: Ids, replica: str, at_s: float, place: int) -> None:
        written = self._written(replica)
        written[path] = np.minimum(written[path], at_s)
        self._last_user[path] = place

    def _compare(self, sent: Sent, same: int, both: int, old_ends: Ids, last: Sent) -> None:
        """Where a returning prompt leaves what its conversation had sent. same: leading blocks; both: that both have."""
        sent.answered = last.prompt + last.reply
        hashed = len(old_ends) and int(old_ends[-1]) > last.prompt
        sent.before, sent.pause_s = sent.answered if hashed else last.prompt, max(0.0, sent.at_s - last.end_s)
        if same < both:
            sent.edge = int(old_ends[same - 1]) if same else 0
            if sent.edge + 1 >= last.prompt:
                self.shortened += sent.prompt < sent.answered
            elif sent.session not in self._edited:
                self._edited.add(sent.session)
                self.edges[sent.edge] += 1
        elif last.prompt <= sent.prompt < sent.answered:
            sent.edge = last.prompt
            self.shortened += 1


def parts(sent: Sent, found: int) -> Iterator[tuple[Cause, int, int]]:
    """The missed positions [found, prompt) in runs, each with its cause; `capacity` stands for order, too."""
    in_time = max(found, sent.in_time)
    here, ever = max(in_time, sent.here), max(in_time, sent.ever)
    yield "capacity", found, in_time
    yield "late", in_time, here
    yield "routed", here, ever
    at = ever
    if sent.pause_s is not None:
        ends: list[tuple[Cause, int]] = [("late", sent.before), ("answer", sent.answered)]
        if sent.edge is not None:
            ends[0] = ("edited", sent.answered if sent.edge >= sent.before else sent.before)
        for cause, end in ends:
            stop = min(sent.prompt, max(at, end))
            yield cause, at, stop
            at = stop
    yield "never", at, sent.prompt


class Missed(NamedTuple):
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Split:
    """Causes of all misses; None: the recording cannot tell, and the cause is contained in the others. Those that are known
    add up to missed_tokens and missed_s. unlimited_tokens: what a cache without limit would have found."""

    causes: Mapping[Cause, Missed | None]
    prompt_tokens: int
    missed_tokens: int
    missed_s: float
    bound_tokens: int
    unlimited_tokens: int


def split(reading: Reading, found: Sequence[int | None], capacity_tokens: int, prices: PositionPrices) -> Split:
    """Divide all misses among their causes. found: of each request; None: nobody knows, and it does not count.
    capacity_tokens: of all tiers together.

    Capacity and order of eviction are told apart in sum: the order lost what the offline bound finds beyond the engine; the
    rest is capacity, and their seconds are divided as their tokens. The bound is a relaxation (pensieve/lab/bound.py): it may
    give the order too much, never too little.
    """
    tokens, seconds = Counter[Cause](), defaultdict[Cause, float](float)
    asked = [(sent, own) for sent, own in zip(reading.sent, found, strict=True) if own is not None]
    for sent, own in asked:
        for cause, start, stop in parts(sent, own):
            if start < stop:
                tokens[cause] += stop - start
                seconds[cause] += prices.seconds(start, stop)
    # What was written in time, in runs of one last use. Kept from the end of that request to this arrival, it hits.
    idle = Idle.of(
        [
            (min(reading.sent[user].end_s, sent.at_s), sent.at_s, min(stop, sent.in_time) - start, start)
            for sent, _ in asked
            for user, start, stop in sent.uses
            if start < min(stop, sent.in_time)
        ]
    )
    bound_tokens = most_kept(idle, idle.tokens, capacity_tokens)
    engine = sum(min(own, sent.in_time) for sent, own in asked)
    both = tokens["capacity"]
    tokens["order"] = max(
        bound_tokens - engine, 0
    )  # no more than both: the bound finds no more than was written in time
    seconds["order"] = seconds["capacity"] * tokens["order"] / both if both else 0.0
    tokens["capacity"], seconds["capacity"] = both - tokens["order"], seconds["capacity"] - seconds["order"]
    hidden: set[Cause] = set() if reading.replicas else {"routed"}
    if not reading.named and not tokens["edited"]:  # an edited prompt looks like that of another conversation
        hidden.add("edited")
    return Split(
        {one: None if one in hidden else Missed(tokens[one], seconds[one]) for one in CAUSES},
        sum(sent.prompt for sent, _ in asked),
        sum(sent.prompt - own for sent, own in asked),
        sum(prices.seconds(own, sent.prompt) for sent, own in asked),
        bound_tokens,
        sum(sent.ever for sent, _ in asked),
    )
