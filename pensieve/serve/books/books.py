"""The books of an engine: a record of each turn, the ledger of its misses, what each conversation holds, and counts."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pensieve.core.facts import Admission, Computed, Found
from pensieve.core.machine import CostModel, predicted_s
from pensieve.core.plan import CPU, GPU, Repeats, StepPlan, StepResult, Tier
from pensieve.core.request import Request, TokenArray
from pensieve.core.session import Run, Session, tokens_in
from pensieve.serve.books.content import Content
from pensieve.serve.books.holding import Held, Holding
from pensieve.serve.books.ledger import Lookup, Losses, PositionPrices, account
from pensieve.serve.record import TurnRecord

_LONG_ROW = 128  # positions of a row whose time the cost model should tell


@dataclass(slots=True)
class Counts:
    """Times in ns. schedule: scheduler and cache, on the wall, also where the worker is simulated. predicted, predictable:
    the cost model's time and the measured one, of the iterations that computed a single row of at least _LONG_ROW positions.
    plan_bytes, plan_ns, sent_plans: of plans that went to several processes.
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
    plan_bytes: int = 0
    plan_ns: int = 0
    sent_plans: int = 0


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
        if self._cost is not None and self._prices is not None:
            account(record, self._cost, self._prices, self._size)
        return record

    def _findable(self, session: Session, lookup: Lookup, found: Found) -> tuple[int | None, int | None]:
        """At most so many leading tokens of its prompt were in another session before, whose blocks may serve this one, and
        in any session, this one included; None: not known. They say what could have been found, not what was."""
        if found.shared:
            if self._content is None:
                return None, None
            return self._content.findable(session, partial=found.names is None)
        if self._blocks.keys() - {
            GPU,
            CPU,
        }:  # a block there may serve all sessions that begin alike: nobody counts that
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
        counts.plan_bytes += result.plan_bytes
        counts.plan_ns += result.plan_ns
        counts.sent_plans += result.plan_bytes > 0
        moves = () if plan is None else plan.moves
        for move in moves:
            waiting = self._open.get(self._awaited_by.pop(move.ticket, -1))
            if waiting is not None:  # the record of a closed request is not changed: it has been given out
                alike = [len(one.src) for one in moves if (one.source, one.target) == (move.source, move.target)]
                moved = result.h2d_bytes if move.target == GPU else result.d2h_bytes
                known = moved // sum(alike) * len(move.src) if result.error is None else None
                waiting.record.copied("h2d_bytes" if move.target == GPU else "d2h_bytes", known)

    def computed(self, plan: StepPlan, result: StepResult, rows: Sequence[Computed], now_s: float) -> None:
        if len(plan.rows) == 1:
            self._count_prediction(plan.rows[0].runs, result.compute_ns)
        compute_ms, stall_ms = result.compute_ns / 1e6, result.stall_ns / 1e6
        for request_id, token, margin in rows:
            record = self._open[request_id].record
            record.step(compute_ms, stall_ms)
            if token is not None:
                record.token(token, margin, now_s)

    def repeated(
        self, plan: StepPlan, repeats: Repeats, requests: Sequence[int], tokens: Sequence[TokenArray[int]]
    ) -> None:
        counts = self.counts
        counts.steps += len(repeats.ended_ns)
        counts.compute_ns += sum(repeats.compute_ns)
        times_s = array("d", [ended_ns / 1e9 for ended_ns in repeats.ended_ns])
        for request_id, more in zip(requests, tokens, strict=False):
            self._open[request_id].record.more_tokens(more, times_s)
        compute_ms = [ns / 1e6 for ns in repeats.compute_ns]
        for request_id in requests:
            self._open[request_id].record.more_steps(compute_ms)
        if len(plan.rows) == 1 and not tokens:
            ((start, stop),) = plan.rows[0].runs
            for further, compute_ns in enumerate(repeats.compute_ns, start=1):
                ahead = further * (stop - start)
                self._count_prediction([(start + ahead, stop + ahead)], compute_ns)

    def _count_prediction(self, runs: Sequence[Run], compute_ns: int) -> None:
        """Add predicted and measured time of an iteration that computed one row, if that was long enough."""
        if self._cost is not None and tokens_in(runs) >= _LONG_ROW:
            self.counts.predicted_ns += round(predicted_s(self._cost, runs, self._size) * 1e9)
            self.counts.predictable_ns += compute_ns
