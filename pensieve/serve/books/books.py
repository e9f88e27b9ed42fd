"""The books of an engine: a record of each turn, the ledger of its misses, what each conversation holds, and counts.

The ledger says where the history of an admitted prompt was, why what lacked KV did, and what of the time to first token that
took. A turn that ended without a token (cancelled in prefill, timed out, failed) has a ledger of the time until it ended."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

from pensieve.core.facts import Admission, Computed, Facts, Found, Iterations
from pensieve.core.machine import CostModel
from pensieve.core.plan import CPU, GPU, Repeats, StepPlan, StepResult, Tier
from pensieve.core.request import History, Request, TokenArray
from pensieve.core.session import Run, Session, tokens_in
from pensieve.serve.books.holding import Content, Held, Holding
from pensieve.serve.record import Cause, Loss, Miss, Missed, TurnRecord

_LONG_ROW = 128  # positions of a row whose time the cost model should tell


MOST_EVICTORS = 8
_NEVER = float("-inf")

REMEMBERED = 16
"""Pools of evicted blocks of whose content the loss is remembered."""


@dataclass(slots=True)
class Counts:
    """Times in ns. schedule: scheduler and cache, on the wall, also where the worker is simulated. predicted, predictable:
    the cost model's time and the measured one, of the iterations that computed a single row of at least _LONG_ROW positions.
    """

    steps: int = 0
    schedule_ns: int = 0
    compute_ns: int = 0
    stall_ns: int = 0
    h2d_bytes: int = 0
    d2h_bytes: int = 0
    failed_steps: int = 0
    predicted_ns: int = 0
    predictable_ns: int = 0
    forgotten_sessions: int = 0


class Losses(Facts):
    """For whom KV was given up, by session and chunk, or by content."""

    def __init__(self) -> None:
        self._chunks: dict[int, dict[int, Loss]] = {}  # by session number
        self._lost_content: OrderedDict[bytes, Loss] = OrderedDict()
        self._for: tuple[str, float] = ("", 0.0)
        self._taker: Loss | None = None
        self._blocks: dict[Tier, int] = {}

    def tier(self, tier: Tier, blocks: int, earlier: Iterable[int] = ()) -> None:
        self._blocks[tier] = blocks

    def room_for(self, session: Session, now_s: float) -> None:
        self._for, self._taker = (session.name, now_s), None

    def lost(self, session: Session, start: int, stop: int) -> None:
        self._chunks.setdefault(session.number, {}).update(dict.fromkeys(range(start, stop), self._loss()))

    def lost_content(self, name: bytes) -> None:
        self._lost_content[name] = self._loss()
        if len(self._lost_content) > REMEMBERED * self._blocks["gpu"]:
            self._lost_content.popitem(last=False)

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

    def loss_in(self, session: Session, found: Found) -> Callable[[int, bool], Loss | None]:
        """Return what tells the loss of a chunk. The second argument: the prompt has all of the chunk."""
        own, names, first = self._chunks.get(session.number, {}), found.names, None

        def loss_of(index: int, full: bool) -> Loss | None:
            """A chunk that is still there is of no use without those before it: the first of them to go took it too."""
            nonlocal first
            if names is not None and not full:
                return None
            loss = own.get(index) if names is None else self._lost_content.get(names[index])
            if loss is None and index in found.stranded:
                loss = first
            first = first or loss
            return loss

        return loss_of

    def _loss(self) -> Loss:
        self._taker = self._taker or Loss(*self._for)
        return self._taker


class Lookup:
    """Where the history of a prompt is found when it is admitted, in tokens, before its plan changes anything.

    gpu_hit + cpu_hit + disk_hit + recomputed = history; history + new = prompt; shared_hit <= new.
    keep: leading tokens that are its session's own. history: of them, or of what the workload says was said elsewhere, those
    that were computed before. on_gpu, on_cpu: the positions that were found; those beyond the history are shared hits.
    missed: why those positions without KV that were computed before, or would have been but for an edit, have none.
    """

    def __init__(self, session: Session, keep: int, suffix: TokenArray[int], told: History | None, stale: bool) -> None:
        """told: by whoever asks. stale: that is of a session that was forgotten."""
        self.keep, self.prompt, self._told = keep, keep + len(suffix), told
        known = min(keep, session.computed) if told is None or stale else told.tokens
        self.history = min(known, self.prompt - 1)
        self.on_gpu: tuple[Run, ...] = ()
        self.on_cpu: tuple[Run, ...] = ()
        self.missed: tuple[Missed, ...] = ()
        if keep < len(session.tokens) and suffix and suffix[0] != session.tokens[keep]:
            end = min(session.computed, keep + len(suffix))
            self.missed = joined([Missed(max(self.history, keep), end, "edited")])

    def enter(
        self, record: TurnRecord, admission: Admission, loss_of: Callable[[int, bool], Loss | None], size: int
    ) -> None:
        """Record what the admission has found, and which positions are not computed again."""
        found = admission.found
        assert found is not None
        own, self._shares = min(self.history, self.keep), found.shared
        self.on_gpu = found.gpu if found.shared else _below(found.gpu, own)
        self.on_cpu = found.cpu if found.shared else _below(found.cpu, own)
        missed: list[Missed] = []
        for start, stop in without(((0, own),), (*self.on_gpu, *self.on_cpu)):
            index = start // size
            loss = loss_of(index, (index + 1) * size <= own)
            for end in range((index + 1) * size, stop, size):
                following = loss_of(end // size, end + size <= own)
                if following is not loss:
                    missed.append(_lost(start, end, loss))
                    start, loss = end, following
            missed.append(_lost(start, stop, loss))
        for start, stop in without(((own, self.history),), (*self.on_gpu, *self.on_cpu)):
            missed.append(Missed(start, stop, "edited"))  # known to the workload, at another place
        self.missed = (*joined(missed), *self.missed)
        record.prompt_tokens, record.history_tokens = self.prompt, self.history
        record.gpu_hit_tokens, record.cpu_hit_tokens = self._hit(self.on_gpu), self._hit(self.on_cpu)
        record.new_tokens, record.cpu_recomputed_tokens = self.prompt - self.history, admission.again_tokens
        loaded = without(self.on_cpu, admission.work) if admission.again_tokens else self.on_cpu
        record.found = (self.on_gpu, loaded)
        self.enter_disk(record, admission.read)

    def enter_disk(self, record: TurnRecord, read: Iterable[Run]) -> None:
        """Record, after `enter` or where what was read from disk was something else, what came from there, and why each
        prompt position without KV had none."""
        assert record.gpu_hit_tokens is not None and record.cpu_hit_tokens is not None
        on_disk: tuple[Run, ...] = ()
        missed = self.missed
        for start, end in read:
            stop = end if self._shares else min(end, self.history)
            if start < stop:
                on_disk = (*on_disk, (start, stop))
                halves = ((replace(m, stop=min(m.stop, start)), replace(m, start=max(m.start, stop))) for m in missed)
                missed = joined(half for both in halves for half in both)
        hits = record.gpu_hit_tokens + record.cpu_hit_tokens + self._hit(on_disk)
        found = (*self.on_gpu, *self.on_cpu, *on_disk)
        record.disk_hit_tokens = self._hit(on_disk)
        record.recomputed_tokens = self.history - hits
        record.shared_hit_tokens = tokens_in(found) - hits if self._shares else 0
        record.found = (*record.found[:2], on_disk)
        record.missed = self._explained(missed, found)

    def _hit(self, runs: tuple[Run, ...]) -> int:
        return tokens_in(_below(runs, self.history))

    def _explained(self, missed: Sequence[Missed], found: Sequence[Run]) -> tuple[Missed, ...]:
        """Explain every prompt position without KV. Where the engine does not know the conversation, whoever asks says why;
        what is left was never said before."""
        told, runs, later = self._told, list[Missed](), list[Missed]()
        for one in missed:
            if one.stop > self.history:
                later.append(one)
            elif told is not None and told.lost == "restarted" and one.cause in ("never_stored", "edited"):
                runs.append(replace(one, cause="restarted"))  # of what was said elsewhere the engine has no token
            else:
                runs.append(one)
        if told is not None and told.lost == "kept" and not self.keep and not self.history:
            later.append(Missed(0, min(told.tokens, self.prompt), "expired"))
        for place, end in without(((self.history, self.prompt),), found):
            for one in later:
                start, stop = max(one.start, place), min(one.stop, end)
                if start < stop:
                    runs += (Missed(place, start, "new"), Missed(start, stop, one.cause, one.loss))
                    place = stop
            runs.append(Missed(place, end, "new"))
        return joined(runs)


@dataclass(slots=True)
class _Open:
    """A request that has not ended. lookup: of its prompt, at its admission."""

    request: Request
    record: TurnRecord
    lookup: Lookup | None = None


class Books(Losses):
    """Keeps the books of one engine. cost: what records go by; None: nothing is priced."""

    def __init__(self, chunk_tokens: int, cost: CostModel | None = None) -> None:
        super().__init__()
        self._size, self._cost = chunk_tokens, cost
        self._prices = PositionPrices(cost, chunk_tokens) if cost is not None else None
        self.counts = Counts()
        self.holding: Holding | None = None
        self._content: Content | None = None
        self._earlier: dict[Tier, list[int]] = {}
        self._begun: set[int] = set()  # numbers of sessions that had tokens when a request of them was admitted
        self._inherited: dict[int, int] = {}  # session number -> leading tokens that it began with, of another session
        self._open: dict[int, _Open] = {}  # by request, in their order
        self._awaited_by: dict[int, int] = {}  # request by ticket of a copy that no collected plan has had

    def watch_content(self) -> None:
        """Record from now on how much of each prompt other sessions have had, where sessions can share KV. Called before the
        first request, if at all."""
        self._content = Content(self._size)

    def count_holding(self) -> None:
        """Count from now on what each session holds of each tier (holding.py). Called before the first request, if at all.
        Its memory grows with the number of sessions ever asked."""
        self.holding = Holding()
        for tier, blocks in self._blocks.items():
            self.holding.tier(tier, blocks, self._earlier[tier])

    def holdings(self) -> dict[tuple[str, Tier], Held]:
        """Return what each session has held of each tier, up to the time told last; empty without `count_holding`."""
        return {} if self.holding is None else self.holding.until_now()

    # -- time, tiers and sessions -------------------------------------------------------------------------------------

    def at(self, now_ns: int) -> None:
        if self.holding is not None:
            # With plans in flight, the time at which one ended may be before that at which the next was made.
            self.holding.now_ns = max(self.holding.now_ns, now_ns)

    def tier(self, tier: Tier, blocks: int, earlier: Iterable[int] = ()) -> None:
        super().tier(tier, blocks)
        self._earlier[tier] = list(earlier)

    def held(self, tier: Tier, blocks: Sequence[int], session: int) -> None:
        if self.holding is not None:
            self.holding.give(tier, blocks, session)

    def freed(self, tier: Tier, blocks: Sequence[int]) -> None:
        if self.holding is not None:
            self.holding.take(tier, blocks)

    def passed_on(self, tier: Tier, blocks: Sequence[int], session: int) -> None:
        if self.holding is not None:
            self.holding.take(tier, blocks, session)

    def opened(self, session: Session) -> None:
        if self.holding is not None:
            self.holding.open(session.number, session.name)

    def began_as(self, session: Session) -> None:
        self._inherited[session.number] = session.computed

    def truncating(self, session: Session, length: int) -> None:
        inherited = self._inherited.get(session.number)
        if inherited is not None:
            self._inherited[session.number] = min(inherited, length)
        if self._content is not None:
            self._content.truncating(session, length)

    def runs(self, session: Session) -> None:
        if self.holding is not None:
            self.holding.run(session.number, True)

    def rests(self, session: Session) -> None:
        if self.holding is not None:
            self.holding.run(session.number, False)

    def closed(self, session: Session) -> None:
        super().closed(session)
        self._begun.discard(session.number)
        self._inherited.pop(session.number, None)
        if self._content is not None:
            self._content.closed(session)

    def room_for(self, session: Session, now_s: float) -> None:
        super().room_for(session, now_s)
        if self.holding is not None:
            self.at(round(now_s * 1e9))

    # -- requests -----------------------------------------------------------------------------------------------------

    def arrived(self, request: Request, turn: int, now_s: float) -> None:
        self._open[request.id] = _Open(request, TurnRecord.arrived(request, turn, now_s))

    def admitting(self, request: Request, session: Session, keep: int, suffix: TokenArray[int]) -> None:
        told = request.history
        if session.tokens:
            self._begun.add(session.number)
        stale = told is not None and told.lost == "kept" and session.number not in self._begun
        self._open[request.id].lookup = Lookup(session, keep, suffix, told, stale)

    def admitted(self, request: Request, session: Session, admission: Admission, now_s: float) -> None:
        record, lookup, found = self._open[request.id].record, self._open[request.id].lookup, admission.found
        assert found is not None and lookup is not None
        record.admitted_s = now_s
        record.elsewhere_tokens, record.anywhere_tokens = self._findable(session, lookup, found)
        lookup.enter(record, admission, self.loss_in(session, found), self._size)

    def resumed(self, request: Request, session: Session, admission: Admission, misread: bool) -> None:
        record, lookup = self._open[request.id].record, self._open[request.id].lookup
        if misread and lookup is not None:
            lookup.enter_disk(record, admission.read)
            return
        for start, stop in admission.work:
            record.resumed_recomputed_tokens += max(0, min(stop, session.computed) - start)
        record.resumed_swapped_tokens += admission.loaded_tokens
        self._open[request.id].lookup = None

    def ended(self, request: Request, status: str, reason: str | None, now_s: float, error: str | None) -> TurnRecord:
        record = self._open.pop(request.id).record
        record.close(status, reason, now_s, error)
        if self._prices is not None:
            account(record, self._prices)
        return record

    def _findable(self, session: Session, lookup: Lookup, found: Found) -> tuple[int | None, int | None]:
        """At most so many leading tokens of its prompt were in another session before, whose blocks may serve this one, and
        in any session, this one included; None: not known. They say what could have been found, not what was."""
        if found.shared:
            if self._content is None:
                return None, None
            return self._content.findable(session, partial=found.names is None)
        if self._blocks.keys() - {GPU, CPU}:  # a block there may serve all that begin alike: nobody counts that
            return None, None
        self._content = None  # no admission here asks for it
        own = min(lookup.history, lookup.keep)
        return min(own, self._inherited.get(session.number, 0)), lookup.history

    # -- steps --------------------------------------------------------------------------------------------------------

    def scheduled(self, took_ns: int) -> None:
        self.counts.schedule_ns += took_ns

    def expired(self) -> None:
        self.counts.forgotten_sessions += 1

    def awaited(self, ticket: int, session: Session) -> None:
        for request_id, one in self._open.items():
            if one.request.session == session.name:
                self._awaited_by[ticket] = request_id
                break

    def collected(self, plan: StepPlan | None, result: StepResult) -> None:
        counts = self.counts
        counts.steps += plan is not None
        counts.failed_steps += plan is not None and result.error is not None
        counts.compute_ns += result.compute_ns
        counts.stall_ns += result.stall_ns
        counts.h2d_bytes += result.h2d_bytes
        counts.d2h_bytes += result.d2h_bytes
        moves = () if plan is None else plan.moves
        for move in moves:
            waiting = self._open.get(self._awaited_by.pop(move.ticket, -1))
            if waiting is not None:  # the record of a closed request is not changed: it has been given out
                alike = [len(one.src) for one in moves if (one.source, one.target) == (move.source, move.target)]
                moved = result.h2d_bytes if move.target == GPU else result.d2h_bytes
                known = moved // sum(alike) * len(move.src) if result.error is None else None
                waiting.record.copied("h2d_bytes" if move.target == GPU else "d2h_bytes", known)

    def computed(self, plan: StepPlan, result: StepResult, rows: Sequence[Computed], now_s: float) -> None:
        if len(plan.rows) == 1 and not plan.decodes.requests:
            self._count_prediction(plan.rows[0].runs, result.compute_ns)
        compute_ms, stall_ms = result.compute_ns / 1e6, result.stall_ns / 1e6
        for request_id, token, margin in rows:
            record = self._open[request_id].record
            record.step(compute_ms, stall_ms)
            if token is not None:
                record.token(token, margin, now_s)

    def repeated(self, plan: StepPlan, repeats: Repeats, prefills: Sequence[int]) -> None:
        counts = self.counts
        counts.steps += len(repeats.ended_ns)
        counts.compute_ns += int(repeats.compute_ns.sum())
        compute_ms = (repeats.compute_ns / 1e6).tolist() if prefills else ()
        for request_id in prefills:
            self._open[request_id].record.more_steps(compute_ms)
        if prefills and len(plan.rows) == 1 and not plan.decodes.requests:
            ((start, stop),) = plan.rows[0].runs
            for further, compute_ns in enumerate(repeats.compute_ns.tolist(), start=1):
                ahead = further * (stop - start)
                self._count_prediction([(start + ahead, stop + ahead)], compute_ns)

    def decoded(self, request: Request, tokens: TokenArray[int], iterations: Iterations) -> None:
        record = self._open[request.id].record
        record.more_tokens(tokens, iterations.ended_s)
        record.more_steps(iterations.compute_ms, iterations.stall_ms)

    def _count_prediction(self, runs: Sequence[Run], compute_ns: int) -> None:
        """Add predicted and measured time of an iteration that computed one row, if that was long enough."""
        if self._cost is not None and tokens_in(runs) >= _LONG_ROW:
            self.counts.predicted_ns += round(predicted_s(self._cost, runs, self._size) * 1e9)
            self.counts.predictable_ns += compute_ns


def without(runs: Iterable[Run], gone: Iterable[Run]) -> tuple[Run, ...]:
    """Return what is left of `runs` once the intervals `gone` are cut out of them."""
    left = list(runs)
    for first, last in gone:
        whole, left = left, []
        for start, stop in whole:
            if start < first:
                left.append((start, min(stop, first)))
            if last < stop:
                left.append((max(start, last), stop))
    return tuple(left)


def _lost(start: int, stop: int, loss: Loss | None) -> Missed:
    return Missed(start, stop, "evicted" if loss else "never_stored", loss)


def _below(runs: tuple[Run, ...], position: int) -> tuple[Run, ...]:
    if not runs or runs[-1][1] <= position:
        return runs
    return tuple((start, min(stop, position)) for start, stop in runs if start < position)


def marginal_s(cost: CostModel, start: int, stop: int, chunk_tokens: int) -> float:
    """Positions [start, stop) of a conversation, computed as part of a longer prefill."""
    seconds, recompute_s = 0.0, cost.recompute_s
    for end in range((start // chunk_tokens + 1) * chunk_tokens, stop, chunk_tokens):
        seconds += recompute_s(end) * (end - start) / chunk_tokens
        start = end
    return seconds + recompute_s(stop) * (stop - start) / chunk_tokens if start < stop else seconds


def predicted_s(cost: CostModel, runs: Iterable[tuple[int, int]], chunk_tokens: int) -> float:
    """An iteration that computes these positions of one conversation, chunk by chunk as the eviction policy counts them, and
    what the weights of a short one take beyond their arithmetic."""
    marginal, tokens = 0.0, 0
    for start, stop in runs:
        tokens += stop - start
        marginal += marginal_s(cost, start, stop, chunk_tokens)
    linear = cost.recompute_s(chunk_tokens) * tokens / chunk_tokens  # a first chunk attends to next to nothing
    return cost.step_s() + marginal + max(0.0, cost.weights_s() - linear)


class PositionPrices:
    """Seconds to compute positions as part of a longer prefill, with a price for each that does not depend on which others
    are computed: a part of a chunk at the price of the whole one. So what several runs take adds up. Sums of leading chunks
    are kept, so that any interval is priced at once."""

    def __init__(self, cost: CostModel, chunk_tokens: int) -> None:
        self._cost = cost
        self._size = chunk_tokens
        self._chunks: list[float] = []
        self._whole: list[float] = []  # as marginal_s adds them up
        self._sums = [0.0]  # of the leading chunks

    def seconds(self, start: int, stop: int) -> float:
        return self._below(stop) - self._below(start)

    def marginal(self, start: int, stop: int) -> float:
        """What marginal_s says, to the last bit."""
        size, seconds, recompute_s, whole = self._size, 0.0, self._cost.recompute_s, self._whole
        last = (stop - 1) // size
        if start % size and start // size < last:
            end = (start // size + 1) * size
            seconds, start = recompute_s(end) * (end - start) / size, end
        if start // size < last:
            self._price(last * size)
            whole += [price * size / size for price in self._chunks[len(whole) : last]]
            seconds, start = reduce(add, whole[start // size : last], seconds), last * size
        return seconds + recompute_s(stop) * (stop - start) / size if start < stop else seconds

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


def account(record: TurnRecord, prices: PositionPrices) -> None:
    """Price, once it is over, what it computed again and what it found (seconds), and make its ledger."""
    if (history := record.history_tokens) is not None:
        again = [(one.start, min(one.stop, history)) for one in record.missed if one.start < history]
        record.recomputed_s = prices.of(again)
        record.saved_s = tuple([prices.of(runs) for runs in record.found])
    waited_ms = record.latency_ms if record.ttft_ms is None else record.ttft_ms
    if waited_ms is not None and record.missed:
        record.misses = ledger_of(record.missed, waited_ms, prices)
    record.missed = record.found = ()


def ledger_of(missed: Sequence[Missed], waited_ms: float, prices: PositionPrices) -> tuple[Miss, ...]:
    """Divide the time that a turn waited for its first token among the causes of its missed positions, in proportion to
    what the cost model says each position takes to compute. Returns a line for each cause and evicting conversation (the
    MOST_EVICTORS largest): their tokens add up to the positions missed, their ms to waited_ms."""
    lines: dict[tuple[Cause, str | None], list[float]] = {}  # tokens, seconds, and when the last of them was given up
    for one in missed:
        line = lines.setdefault((one.cause, one.loss.by if one.loss else None), [0, 0.0, _NEVER])
        line[0] += one.stop - one.start
        line[1] += prices.marginal(one.start, one.stop)
        line[2] = max(line[2], one.loss.at_s if one.loss else _NEVER)
    named = sorted((key for key in lines if key[1] is not None), key=lambda key: (-lines[key][0], key))
    for cause, by in named[MOST_EVICTORS:]:
        more, rest = lines.pop((cause, by)), lines.setdefault((cause, None), [0, 0.0, _NEVER])
        rest[:] = [rest[0] + more[0], rest[1] + more[1], max(rest[2], more[2])]
    count, total, _ = map(sum, zip(*lines.values(), strict=True))
    return tuple(
        Miss(
            cause,
            int(tokens),
            waited_ms * (seconds / total if total else tokens / count),
            by,
            at_s if at_s > _NEVER else None,
        )
        for (cause, by), (tokens, seconds, at_s) in lines.items()
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
