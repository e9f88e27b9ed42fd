"""The books of an engine: a record of each turn, the ledger of its misses, what each conversation holds, and counts."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pensieve.core.cost import CostModel, predicted_s
from pensieve.core.facts import NOBODY_NOW, Admission, Computed, Facts, Found
from pensieve.core.plan import CPU, GPU, Repeats, StepPlan, StepResult, Tier
from pensieve.core.request import Request, TokenArray
from pensieve.core.session import Run, Session, tokens_in
from pensieve.serve.books.content import Content
from pensieve.serve.books.holding import Held, Holders, Holding
from pensieve.serve.books.ledger import Asked, Losses, PositionPrices, Residency, account
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


class Books(Facts):
    """Keeps the books of one engine. cost: what records go by; None: nothing is priced."""

    def __init__(self, chunk_tokens: int, cost: CostModel | None = None) -> None:
        self._size, self._cost = chunk_tokens, cost
        self._prices = PositionPrices(cost, chunk_tokens) if cost is not None else None
        self.counts = Counts()
        self._losses = Losses()
        self._content: Content | None = None
        self._holding: Holding | None = None
        self._holders: dict[Tier, Holders] = {}
        self._blocks: dict[Tier, int] = {}
        self._earlier: dict[Tier, list[int]] = {}
        self._begun: set[int] = set()  # numbers of sessions that had tokens when a request of them was admitted
        self._inherited: dict[int, int] = {}  # session number -> leading tokens that it began with, of another session
        self._asked: dict[int, Asked] = {}  # by request
        self._residency: dict[int, Residency] = {}  # by request, at its admission, without what was read from disk
        self._records: dict[int, TurnRecord] = {}  # by request that has not ended
        self._of_session: dict[str, dict[int, None]] = {}  # such requests by session, in their order
        self._awaited_by: dict[int, int] = {}  # request by ticket of a copy that no collected plan has had

    def watch_content(self) -> None:
        """Record from now on how much of each prompt other sessions have had, where sessions can share KV. Called before the
        first request, if at all."""
        self._content = Content(self._size)

    def count_holding(self) -> None:
        """Count from now on what each session holds of each tier (holding.py). Called before the first request, if at all.
        Its memory grows with the number of sessions ever asked."""
        self._holding = Holding()
        for tier, blocks in self._blocks.items():
            column = self._holders[tier] = self._holding.column(tier, blocks)
            column.give(self._earlier[tier], NOBODY_NOW)

    def holdings(self) -> dict[tuple[str, Tier], Held]:
        """Return what each session has held of each tier, up to the time told last; empty without `count_holding`."""
        return {} if self._holding is None else self._holding.until_now()

    # -- time, tiers and sessions -------------------------------------------------------------------------------------

    def at(self, now_ns: int) -> None:
        if self._holding is not None:
            # With plans in flight, the time at which one ended may be before that at which the next was made.
            self._holding.now_ns = max(self._holding.now_ns, now_ns)

    def tier(self, tier: Tier, blocks: int, earlier: Iterable[int] = ()) -> None:
        self._blocks[tier], self._earlier[tier] = blocks, list(earlier)

    def held(self, tier: Tier, blocks: Sequence[int], session: int) -> None:
        if self._holding is not None:
            self._holders[tier].give(blocks, session)

    def freed(self, tier: Tier, blocks: Sequence[int]) -> None:
        if self._holding is not None:
            self._holders[tier].take(blocks)

    def passed_on(self, tier: Tier, blocks: Sequence[int], session: int) -> None:
        if self._holding is not None:
            self._holders[tier].pass_on(blocks, session)

    def opened(self, session: Session) -> None:
        if self._holding is not None:
            self._holding.open(session.number, session.name)

    def began_as(self, session: Session) -> None:
        self._inherited[session.number] = session.computed

    def truncating(self, session: Session, length: int) -> None:
        inherited = self._inherited.get(session.number)
        if inherited is not None:
            self._inherited[session.number] = min(inherited, length)
        if self._content is not None:
            self._content.truncating(session, length)

    def runs(self, session: Session) -> None:
        if self._holding is not None:
            self._holding.account(session.number).start()

    def rests(self, session: Session) -> None:
        if self._holding is not None:
            self._holding.account(session.number).stop()

    def closed(self, session: Session) -> None:
        self._losses.closed(session)
        self._begun.discard(session.number)
        self._inherited.pop(session.number, None)
        if self._content is not None:
            self._content.closed(session)
        if self._holding is not None:
            self._holding.close(session.number)

    # -- KV is lost ---------------------------------------------------------------------------------------------------

    def room_for(self, session: Session, now_s: float) -> None:
        self._losses.room_for(session, now_s)
        if self._holding is not None:
            self.at(round(now_s * 1e9))

    def lost(self, session: Session, start: int, stop: int) -> None:
        self._losses.lost(session, start, stop)

    def lost_content(self, name: bytes) -> None:
        self._losses.lost_content(name, self._blocks["gpu"])

    def not_lost(self, session: Session, start: int, stop: int) -> None:
        self._losses.not_lost(session, start, stop)

    def moved(self, source: Session, target: Session, index: int) -> None:
        self._losses.moved(source, target, index)

    # -- requests -----------------------------------------------------------------------------------------------------

    def arrived(self, request: Request, turn: int, now_s: float) -> None:
        self._records[request.id] = TurnRecord.arrived(request, turn, now_s)
        self._of_session.setdefault(request.session, {})[request.id] = None

    def admitting(self, request: Request, session: Session, keep: int, suffix: TokenArray[int]) -> None:
        told = request.history
        if session.tokens:
            self._begun.add(session.number)
        elif told is not None and told.lost == "kept" and session.number not in self._begun:
            told = None
        self._asked[request.id] = Asked.of(session, keep, suffix, told)

    def admitted(self, request: Request, session: Session, admission: Admission, now_s: float) -> None:
        asked, record = self._asked[request.id], self._records[request.id]
        assert admission.found is not None
        residency = asked.residency(session, admission.found, self._losses, self._size)
        self._residency[request.id] = residency
        record.admitted_s = now_s
        record.elsewhere_tokens, record.anywhere_tokens = self._findable(session, asked, admission.found)
        residency.enter(record, admission)
        found = residency.with_disk(admission.read) if admission.read else residency
        found.enter_disk(record, request, asked.keep)

    def resumed(self, request: Request, session: Session, admission: Admission, misread: bool) -> None:
        record, residency = self._records[request.id], self._residency.get(request.id)
        if misread and residency is not None:
            residency.with_disk(admission.read).enter_disk(record, request, self._asked[request.id].keep)
            return
        again = sum(max(0, min(stop, session.computed) - start) for start, stop in admission.work)
        record.resumed(admission.loaded_tokens, again)
        self._residency.pop(request.id, None)

    def ended(self, request: Request, status: str, reason: str | None, now_s: float, error: str | None) -> TurnRecord:
        record = self._records.pop(request.id)
        own = self._of_session[request.session]
        del own[request.id]
        if not own:
            del self._of_session[request.session]
        self._asked.pop(request.id, None)
        self._residency.pop(request.id, None)
        record.close(status, reason, now_s, error)
        if self._cost is not None and self._prices is not None:
            account(record, self._cost, self._prices, self._size)
        return record

    def _findable(self, session: Session, asked: Asked, found: Found) -> tuple[int | None, int | None]:
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
        own = min(asked.history, asked.keep)
        return min(own, self._inherited.get(session.number, 0)), asked.history

    # -- steps --------------------------------------------------------------------------------------------------------

    def scheduled(self, took_ns: int) -> None:
        self.counts.schedule_ns += took_ns

    def expired(self) -> None:
        self.counts.forgotten_sessions += 1

    def awaited(self, ticket: int, session: Session) -> None:
        self._awaited_by[ticket] = next(iter(self._of_session[session.name]))

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
        if plan is not None and plan.moves:
            self._count_copies(plan, GPU, CPU, result)
            self._count_copies(plan, CPU, GPU, result)

    def _count_copies(self, plan: StepPlan, source: Tier, target: Tier, result: StepResult) -> None:
        """Attribute the bytes that the step moved to the turns that waited for them. Blocks are equally large. What a
        failed step moved is unknown. The record of a closed request is not changed: it has been given out."""
        copies = [move for move in plan.moves if move.source == source and move.target == target]
        moved = result.h2d_bytes if target == GPU else result.d2h_bytes
        blocks = sum(len(move.src) for move in copies)
        for move in copies:
            record = self._records.get(self._awaited_by.pop(move.ticket, -1))
            if record is not None:
                known = moved // blocks * len(move.src) if result.error is None else None
                record.copied("h2d_bytes" if target == GPU else "d2h_bytes", known)

    def computed(self, plan: StepPlan, result: StepResult, rows: Sequence[Computed], now_s: float) -> None:
        if len(plan.rows) == 1:
            self._count_prediction(plan.rows[0].runs, result.compute_ns)
        records, compute_ms, stall_ms = self._records, result.compute_ns / 1e6, result.stall_ns / 1e6
        for request_id, token, margin in rows:
            record = records[request_id]
            record.step(compute_ms, stall_ms)
            if token is not None:
                record.token(token, margin, now_s)

    def repeated(
        self, plan: StepPlan, repeats: Repeats, requests: Sequence[int], tokens: Sequence[TokenArray[int]]
    ) -> None:
        counts, records = self.counts, self._records
        counts.steps += len(repeats.ended_ns)
        counts.compute_ns += sum(repeats.compute_ns)
        times_s = array("d", [ended_ns / 1e9 for ended_ns in repeats.ended_ns])
        for request_id, more in zip(requests, tokens, strict=False):
            records[request_id].more_tokens(more, times_s)
        compute_ms = [ns / 1e6 for ns in repeats.compute_ns]
        for request_id in requests:
            records[request_id].more_steps(compute_ms)
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
