"""Plays a script against a system: requests, time, cancels, forgotten conversations; what it says of them is kept as rows.

This file alone knows how a request is written and where counts are read, so that a rebuild of either changes one file.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from pensieve.core.request import Forced, Fork, Free, Hint, History, Length, Request, Sampling
from pensieve.lab.compose.build import build_system
from pensieve.lab.compose.model_files import build_tokenizer
from pensieve.lab.compose.plan import plan_trial
from pensieve.serve.record import TurnRecord
from pensieve.serve.systems.inline_system import InlineSystem
from pensieve.sim import worker as simulated
from tests.composed import checked
from tests.frozen.rows import COUNTERS, TIMES, TURN, Rows
from tests.frozen.workers import Faulty, Stepwise, Twin

WORKERS = {"windows": simulated.SimulatedWorker, "stepwise": Stepwise, "faulty": Faulty, "torch": Twin}
WORDS = 90
LONGEST = 52  # tokens after which a conversation of `at_random` is over


def system_of(overrides: Sequence[str], worker: str) -> tuple[InlineSystem, simulated.SimulatedWorker]:
    """The started system of a configuration, on a virtual clock, over one of WORKERS."""
    made: list[simulated.SimulatedWorker] = []

    def make(*args: Any) -> simulated.SimulatedWorker:
        made.append(WORKERS[worker](*args, *extra))
        return made[0]

    plan = plan_trial(checked(*overrides))
    extra = (plan.disk_blocks,) if worker == "torch" else ()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulated, "SimulatedWorker", make)
        system = build_system(plan, build_tokenizer(plan.config.model, plan.model.vocab, True))
    assert isinstance(system, InlineSystem)
    system.start()
    system.watch_content()
    system.count_holding()
    return system, made[0]


def words(text: int, count: int) -> array[int]:
    """Token ids, the same for the same `text`."""
    return array("i", [3 + (text * 40503 + i * (7 * i + text) // 3) % WORDS for i in range(count)])


def rows_of(turns: Sequence[TurnRecord], counted: Mapping[str, float]) -> Rows:
    """Of what a system says of its turns and of itself."""
    return Rows(
        turns=[[getattr(turn, column) for column in TURN] for turn in turns],
        times=[[getattr(turn, column) for column in TIMES] for turn in turns],
        tokens=[[turn.session, turn.turn, turn.output_sha256] for turn in turns],
        counters=[[name, counted.get(name)] for name in COUNTERS],
        misses=[
            [turn.session, turn.turn, miss.cause, miss.evicted_by, miss.tokens, miss.ms, miss.evicted_s]
            for turn in turns
            for miss in turn.misses
        ],
        holdings=[],
    )


class Play:
    """The driver of one script. One request of a conversation at a time."""

    def __init__(self, overrides: Sequence[str], worker: str = "windows") -> None:
        self.system, self._worker = system_of(overrides, worker)
        self.transcripts: dict[str, array[int]] = {}
        self.open: dict[str, Request] = {}  # by conversation
        self.turns: list[TurnRecord] = []
        self.phases: Counter[str] = Counter()  # in which requests were cancelled
        self._started: set[int] = set()  # requests that have a token
        self._numbers = 0
        self._events, self._places = hashlib.sha256(), []

    def ask(
        self,
        name: str,
        tokens: int = 6,
        output: int = 4,
        *,
        keep: int | None = None,
        text: int | None = None,
        fork: Fork | None = None,
        forgotten: tuple[str, str] | None = None,
        forced: bool = False,
        free: bool = False,
        **fields: Any,
    ) -> None:
        """Send a message. keep: the prompt is so many tokens of the transcript and the message. forgotten: the conversation
        whose transcript it goes on with, and why the engine lost it."""
        self._numbers += 1
        message = words(self._numbers if text is None else text, tokens)
        before = self.transcripts.get(name, array("i"))[:keep]
        if fork is not None:
            before = self.transcripts[fork.session][: fork.tokens]
        if forgotten is not None:
            before = self.transcripts[forgotten[0]]
            fields["history"] = History(len(before), forgotten[1])  # type: ignore[arg-type]
        made: Length | Forced | Free = Length(output)
        if forced or isinstance(self._worker, Twin):
            made = Forced(words(-self._numbers, output))
        elif free:
            made = Free(output, ignore_eos=True)
        request = Request(
            self._numbers,
            name,
            self._numbers,
            before + message,
            made,
            intended_s=self.system.clock.now_s(),
            fork=fork,
            **fields,
        )
        self.open[name] = request
        self.system.submit(request)

    def run(self, seconds: float | None = None) -> None:
        """Let so much time pass; None: until nobody waits."""
        now_s = self.system.clock.now_s()
        until = None if seconds is None else round((now_s + seconds) * 1e9) / 1e9  # a moment that the clock can show
        while self._see(self.system.poll(until)) or (until is not None and self.system.clock.now_s() < until):
            pass
        self._places.append(
            [len(self._places), *((name, self.system.places(name)) for name in sorted(self.transcripts))]
        )

    def cancel(self, name: str, status: str = "cancelled") -> None:
        request = self.open[name]
        before = self.system.gauges()["queue_length"]
        self.system.cancel(request.id, status)
        queued = self.system.gauges()["queue_length"] < before
        turns = len(self.turns)
        self._see(self.system.poll(self.system.clock.now_s()))
        self.phases[self._phase(self.turns[turns:], request.id, queued)] += 1

    def forget(self, name: str | None) -> None:
        self.system.forget(name)

    def close(self) -> Rows:
        """Let all requests end; returns what there is to freeze."""
        self.run()
        counted = self.system.counters()
        held = self.system.holdings()
        rows = replace(
            rows_of(self.turns, counted),
            holdings=[[*key, *map(str, value)] for key, value in sorted(held.items())],
            other=[*self._places, ["events", self._events.hexdigest()]],
            cancelled=dict(sorted(self.phases.items())),
            drawn=[[*key, *value] for key, value in sorted(getattr(self._worker, "drawn", {}).items())],
        )
        self.system.forget(None)
        self.system.close()
        return rows

    def _see(self, events: Sequence[Any]) -> bool:
        for event in events:
            told = [event.kind, event.request_id, event.at_s, event.token, event.tokens]
            self._events.update(repr(told).encode())
            self._started.add(event.request_id)
            turn = event.turn
            if turn is not None:
                self.turns.append(turn)
                name = turn.session
                asked = self.open.pop(name)
                if turn.stands:
                    self.transcripts[name] = asked.prompt + turn.token_ids
        return bool(events)

    @staticmethod
    def _phase(ended: Sequence[TurnRecord], request_id: int, queued: bool) -> str:
        """Where a request was when it was cancelled, by what its record has and whether it stood in the queue."""
        (turn,) = [turn for turn in ended if turn.request_id == request_id]
        if queued:
            return "waiting" if turn.admitted_s is None else "suspended"
        if turn.first_token_s is not None:
            return "decode"
        return "prefill" if turn.compute_ms is not None else "swap in"


def at_random(seed: int, steps: int, pause_s: float = 0.02, longest: int = 9) -> Callable[[Play], None]:
    """A script of `steps` drawn actions: all kinds of requests, time, cancels, and conversations that go. longest: output."""

    def script(play: Play) -> None:
        draw = random.Random(seed).random  # the one function whose values every version of Python keeps

        def below(count: int) -> int:
            return int(draw() * count)

        names = [f"c{number}" for number in range(7)]
        gone: list[str] = []

        def leave(place: int) -> None:
            gone.append(names[place])
            names[place] = f"c{7 + len(gone)}"

        def ask() -> None:
            place = below(len(names))
            if len(play.transcripts.get(names[place], ())) > LONGEST:
                play.system.ended(names[place])
                leave(place)
            name, known = names[place], names[place] in play.transcripts
            if name in play.open:
                return
            how: dict[str, Any] = {"tenant": "" if place % 3 else "t", "output": 1 + below(longest)}
            kind = draw()
            if known and kind < 0.15:
                how["keep"] = below(len(play.transcripts[name]) + 1)
            elif not known and kind < 0.3 and (parents := [one for one in names if one in play.transcripts]):
                parent = parents[below(len(parents))]
                tokens = 1 + below(len(play.transcripts[parent]))
                how["fork"] = Fork(parent, tokens, takes_kv=draw() < 0.3)
            elif not known and kind < 0.5:
                how |= {"text": below(2), "tokens": 12 + below(5)}  # begins as others do
            elif not known and kind < 0.6 and (lost := [one for one in gone[-3:] if one in play.transcripts]):
                how["forgotten"] = (lost[below(len(lost))], "kept" if draw() < 0.5 else "restarted")
            elif kind > 0.9:
                how["forced"] = True
            elif kind > 0.8:
                how["free"] = True
            if draw() < 0.4:
                reason, tool = ("tool_use", "search") if draw() < 0.5 else ("end_turn", None)
                how["hint"] = Hint(reason, tool, expected_s=pause_s * below(9))  # type: ignore[arg-type]
            if draw() < 0.4:
                how["next_use_s"] = play.system.clock.now_s() + pause_s * below(20)
            how["sampling"] = Sampling(seed=below(3))
            play.ask(name, **{"tokens": 1 + below(14), **how})

        for _ in range(steps):
            action = draw()
            if action < 0.5:
                ask()
            elif action < 0.88:
                play.run(pause_s * draw() ** 2)
            elif action < 0.96:
                if play.open:
                    name = list(play.open)[below(len(play.open))]
                    play.cancel(name, "cancelled" if draw() < 0.5 else "timeout")
            elif action < 0.98:
                play.system.expect(names[below(len(names))], play.system.clock.now_s() + pause_s * below(20))
            else:
                place = below(len(names))
                if names[place] not in play.open:
                    play.forget(None if draw() < 0.1 else names[place])
                    leave(place)

    return script
