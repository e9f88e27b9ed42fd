"""Where the history of an admitted prompt was, why what lacked KV did, and what of the time to first token that took.

A turn that ended without a token (cancelled in prefill, timed out, failed) has a ledger of the time until it ended."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from pensieve.core.cost import CostModel, marginal_s
from pensieve.core.facts import Admission, Found
from pensieve.core.request import History, Request, TokenArray
from pensieve.core.session import Run, Session, tokens_in, without
from pensieve.serve.record import Cause, Loss, Miss, Missed, TurnRecord

MOST_EVICTORS = 8

REMEMBERED = 16
"""Pools of evicted blocks of whose content the loss is remembered."""


class Losses:
    """For whom KV was given up, by session and chunk, or by content."""

    def __init__(self) -> None:
        self._chunks: dict[int, dict[int, Loss]] = {}  # by session number
        self._content: OrderedDict[bytes, Loss] = OrderedDict()
        self._for: tuple[str, float] = ("", 0.0)
        self._taker: Loss | None = None

    def room_for(self, session: Session, now_s: float) -> None:
        self._for, self._taker = (session.name, now_s), None

    def lost(self, session: Session, start: int, stop: int) -> None:
        self._chunks.setdefault(session.number, {}).update(dict.fromkeys(range(start, stop), self._loss()))

    def lost_content(self, name: bytes, blocks: int) -> None:
        """blocks: of the tier."""
        self._content[name] = self._loss()
        if len(self._content) > REMEMBERED * blocks:
            self._content.popitem(last=False)

    def not_lost(self, session: Session, start: int, stop: int) -> None:
        own = self._chunks.get(session.number)
        if own:
            for index in range(start, stop):
                own.pop(index, None)

    def moved(self, source: Session, target: Session, index: int) -> None:
        known = self._chunks.get(source.number, {}).get(index)
        if known is not None:
            self._chunks.setdefault(target.number, {})[index] = known
        self.lost(source, index, index + 1)

    def closed(self, session: Session) -> None:
        self._chunks.pop(session.number, None)

    def of(self, session: Session, found: Found) -> Callable[[int, bool], Loss | None]:
        """Return what tells the loss of a chunk. The second argument: the prompt has all of the chunk."""
        own, names, first = self._chunks.get(session.number, {}), found.names, None

        def loss_of(index: int, full: bool) -> Loss | None:
            """A chunk that is still there is of no use without those before it: the first of them to go took it too."""
            nonlocal first
            if names is not None and not full:
                return None
            loss = own.get(index) if names is None else self._content.get(names[index])
            if loss is None and index in found.stranded:
                loss = first
            first = first or loss
            return loss

        return loss_of

    def _loss(self) -> Loss:
        self._taker = self._taker or Loss(*self._for)
        return self._taker


@dataclass(frozen=True, slots=True)
class Residency:
    """Where the history of an admitted prompt was, in tokens, before its plan changed anything.

    gpu_hit + cpu_hit + disk_hit + recomputed = history; history + new = prompt; shared_hit <= new.
    on_gpu, on_cpu, on_disk: the positions that were found; those beyond the history are shared hits. missed: why those
    positions without KV that were computed before, or would have been but for an edit, have none.
    """

    prompt: int
    history: int
    on_gpu: tuple[Run, ...]
    on_cpu: tuple[Run, ...]
    missed: tuple[Missed, ...]
    shares: bool = False
    on_disk: tuple[Run, ...] = ()

    @property
    def gpu_hit(self) -> int:
        return tokens_in(_below(self.on_gpu, self.history))

    @property
    def cpu_hit(self) -> int:
        return tokens_in(_below(self.on_cpu, self.history))

    @property
    def shared_hit(self) -> int:
        if not self.shares:
            return 0
        found = tokens_in(self.on_gpu) + tokens_in(self.on_cpu) + tokens_in(self.on_disk)
        return found - self.gpu_hit - self.cpu_hit - self.disk_hit

    @property
    def disk_hit(self) -> int:
        return tokens_in(_below(self.on_disk, self.history))

    def with_disk(self, read: Iterable[Run]) -> Residency:
        """Return a copy that counts these positions as found on disk, and no longer as missed."""
        missed, found = list(self.missed), list(self.on_disk)
        for start, stop in read:
            end = stop if self.shares else min(stop, self.history)
            if start < end:
                found.append((start, end))
            left = [replace(one, stop=min(one.stop, start)) for one in missed]
            left += [replace(one, start=max(one.start, end)) for one in missed]
            missed = sorted((one for one in left if one.start < one.stop), key=lambda one: one.start)
        return replace(self, missed=joined(missed), on_disk=tuple(found))

    def enter(self, record: TurnRecord, admission: Admission) -> None:
        """Record where its history was, and which positions were found and are not computed again."""
        record.prompt_tokens, record.history_tokens = self.prompt, self.history
        record.gpu_hit_tokens, record.cpu_hit_tokens = self.gpu_hit, self.cpu_hit
        record.new_tokens, record.shared_hit_tokens = self.prompt - self.history, self.shared_hit
        record.cpu_recomputed_tokens = admission.again_tokens
        loaded = without(self.on_cpu, admission.work) if admission.again_tokens else self.on_cpu
        record.found = (self.on_gpu, loaded)

    def enter_disk(self, record: TurnRecord, request: Request, keep: int) -> None:
        """Record, after `enter` or where what was read from disk was something else, what came from there, and why each
        prompt position without KV had none."""
        assert record.gpu_hit_tokens is not None and record.cpu_hit_tokens is not None
        disk = record.disk_hit_tokens = self.disk_hit
        record.recomputed_tokens = self.history - record.gpu_hit_tokens - record.cpu_hit_tokens - disk
        if self.on_disk:
            record.shared_hit_tokens = self.shared_hit
        record.found = (*record.found[:2], self.on_disk)
        record.missed = explained(self, request.history, keep)


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt as it is about to be admitted. keep: leading tokens that are its session's own. history: of them, or of what
    the workload says was said elsewhere, those that were computed before. edited: positions at which other tokens were."""

    prompt: int
    keep: int
    history: int
    edited: tuple[Missed, ...]

    @classmethod
    def of(cls, session: Session, keep: int, suffix: TokenArray[int], told: History | None) -> Asked:
        """told: by whoever asks; None: nothing, or what they say is of a session that was forgotten."""
        prompt = keep + len(suffix)
        known = min(keep, session.computed) if told is None else told.tokens
        history = min(known, prompt - 1)
        edited: tuple[Missed, ...] = ()
        if keep < len(session.tokens) and suffix and suffix[0] != session.tokens[keep]:
            edited = joined([Missed(max(history, keep), min(session.computed, keep + len(suffix)), "edited")])
        return cls(prompt, keep, history, edited)

    def residency(self, session: Session, found: Found, losses: Losses, chunk_tokens: int) -> Residency:
        """What it has found. session: whose KV it is."""
        own = min(self.history, self.keep)
        on_gpu, on_cpu = found.gpu, found.cpu
        if not found.shared:
            on_gpu, on_cpu = _below(on_gpu, own), _below(on_cpu, own)
        loss_of = losses.of(session, found)
        missed: list[Missed] = []
        for start, stop in without(((0, own),), (*on_gpu, *on_cpu)):
            index = start // chunk_tokens
            loss = loss_of(index, (index + 1) * chunk_tokens <= own)
            for end in range((index + 1) * chunk_tokens, stop, chunk_tokens):
                following = loss_of(end // chunk_tokens, end + chunk_tokens <= own)
                if following is not loss:
                    missed.append(_lost(start, end, loss))
                    start, loss = end, following
            missed.append(_lost(start, stop, loss))
        elsewhere = without(((own, self.history),), (*on_gpu, *on_cpu))  # known to the workload, at another place
        missed += (Missed(start, stop, "edited") for start, stop in elsewhere)
        return Residency(self.prompt, self.history, on_gpu, on_cpu, (*joined(missed), *self.edited), found.shared)


def _lost(start: int, stop: int, loss: Loss | None) -> Missed:
    return Missed(start, stop, "evicted" if loss else "never_stored", loss)


def _below(runs: tuple[Run, ...], position: int) -> tuple[Run, ...]:
    if not runs or runs[-1][1] <= position:
        return runs
    return tuple((start, min(stop, position)) for start, stop in runs if start < position)


def explained(residency: Residency, told: History | None, keep: int) -> tuple[Missed, ...]:
    """Explain every prompt position without KV. Where the engine does not know the conversation, whoever asks says why; what
    is left was never said before. keep: tokens of the session that the turn leaves as they are."""
    runs = [one for one in residency.missed if one.stop <= residency.history]
    if told is not None and told.lost == "restarted":
        lost = ("never_stored", "edited")  # what was said elsewhere is in no token that the engine has
        runs = [replace(one, cause="restarted") if one.cause in lost else one for one in runs]
    later = [one for one in residency.missed if one.stop > residency.history]
    if told is not None and told.lost == "kept" and not keep and not residency.history:
        later.append(Missed(0, min(told.tokens, residency.prompt), "expired"))
    found = (*residency.on_gpu, *residency.on_cpu, *residency.on_disk)
    for place, end in without(((residency.history, residency.prompt),), found):
        for one in later:
            start, stop = max(one.start, place), min(one.stop, end)
            if start < stop:
                runs += (Missed(place, start, "new"), Missed(start, stop, one.cause, one.loss))
                place = stop
        runs.append(Missed(place, end, "new"))
    return joined(runs)


class PositionPrices:
    """Seconds to compute positions as part of a longer prefill, with a price for each that does not depend on which others
    are computed: a part of a chunk at the price of the whole one. So what several runs take adds up. Sums of leading chunks
    are kept, so that any interval is priced at once."""

    def __init__(self, cost: CostModel, chunk_tokens: int) -> None:
        self._cost = cost
        self._size = chunk_tokens
        self._chunks: list[float] = []
        self._sums = [0.0]  # of the leading chunks

    def seconds(self, start: int, stop: int) -> float:
        return self._below(stop) - self._below(start)

    def of(self, runs: Iterable[tuple[int, int]]) -> float:
        """Seconds of several intervals."""
        seconds = 0.0
        for start, stop in runs:
            seconds += self._below(stop) - self._below(start)
        return seconds

    def _below(self, position: int) -> float:
        self._price(position)
        whole, rest = divmod(position, self._size)
        return self._sums[whole] + (self._chunks[whole] * rest / self._size if rest else 0.0)

    def _price(self, position: int) -> None:
        for index in range(len(self._chunks), -(-position // self._size)):
            self._chunks.append(self._cost.recompute_s((index + 1) * self._size))
            self._sums.append(self._sums[-1] + self._chunks[-1])


def account(record: TurnRecord, cost: CostModel, prices: PositionPrices, chunk_tokens: int) -> None:
    """Price, once it is over, what it computed again and what it found (seconds), and make its ledger."""
    if (history := record.history_tokens) is not None:
        again = [(one.start, min(one.stop, history)) for one in record.missed if one.start < history]
        record.recomputed_s = prices.of(again)
        record.saved_s = tuple([prices.of(runs) for runs in record.found])
    waited_ms = record.latency_ms if record.ttft_ms is None else record.ttft_ms
    if waited_ms is not None and record.missed:
        record.misses = ledger_of(record.missed, waited_ms, cost, chunk_tokens)
    record.missed = record.found = ()


def ledger_of(missed: Sequence[Missed], waited_ms: float, cost: CostModel, chunk_tokens: int) -> tuple[Miss, ...]:
    """Divide the time that a turn waited for its first token among the causes of its missed positions, in proportion to
    what the cost model says each position takes to compute. Returns a line for each cause and evicting conversation (the
    MOST_EVICTORS largest): their tokens add up to the positions missed, their ms to waited_ms."""
    seconds: dict[tuple[Cause, str | None], float] = {}
    tokens: dict[tuple[Cause, str | None], int] = {}
    when: dict[tuple[Cause, str | None], float] = {}
    for one in missed:
        key = (one.cause, one.loss.by if one.loss else None)
        seconds[key] = seconds.get(key, 0.0) + marginal_s(cost, one.start, one.stop, chunk_tokens)
        tokens[key] = tokens.get(key, 0) + one.stop - one.start
        if one.loss is not None:
            when[key] = max(when.get(key, one.loss.at_s), one.loss.at_s)
    named = sorted((key for key in tokens if key[1] is not None), key=lambda key: (-tokens[key], key))
    for key in named[MOST_EVICTORS:]:
        rest = (key[0], None)
        tokens[rest] = tokens.get(rest, 0) + tokens.pop(key)
        seconds[rest] = seconds.get(rest, 0.0) + seconds.pop(key)
        when[rest] = max(when.get(rest, when[key]), when.pop(key))
    total = sum(seconds.values())
    count = sum(tokens.values())
    return tuple(
        Miss(
            cause,
            tokens[cause, by],
            waited_ms * (seconds[cause, by] / total if total else tokens[cause, by] / count),
            by,
            when.get((cause, by)),
        )
        for cause, by in tokens
    )


def joined(missed: Iterable[Missed]) -> tuple[Missed, ...]:
    """Join neighbours of one cause and loss, and leave empty ones out."""
    runs: list[Missed] = []
    for one in missed:
        if one.start >= one.stop:
            continue
        last = runs[-1] if runs else None
        if last is not None and (last.stop, last.cause, last.loss) == (one.start, one.cause, one.loss):
            runs[-1] = Missed(last.start, one.stop, one.cause, one.loss)
        else:
            runs.append(one)
    return tuple(runs)
