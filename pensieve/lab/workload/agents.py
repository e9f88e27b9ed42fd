"""Agents that reason, act in the world outside, and reflect on what came of it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from pensieve.core.hint import Hint
from pensieve.core.request import Length
from pensieve.lab.workload.base import (
    Arrival,
    Asking,
    Count,
    Following,
    NotNegative,
    Positive,
    WorkloadContext,
    WorkloadPlan,
    within_memory,
)
from pensieve.lab.workload.chance import uniform
from pensieve.lab.workload.prose import prose
from pensieve.serve.record import TurnRecord

STAGES = ("reason", "reflect")
ACT_SPREAD = 0.2


class AgentsWorkload(Asking):
    """N agents on one engine (load "closed"), each a conversation that goes through `steps` rounds of three stages.

    Reason sends a prompt; Act waits for the world, `act_s` seconds give or take a tenth, and asks the model nothing;
    Reflect sends only what the world answered, and its context is everything said before. The next Reason follows the
    reflection at once. Each turn carries its stage as phase and label, and as a hint the tool and its mean seconds.

    agents: how many at once. reason_tokens, observation_tokens: lengths of the prompts; reason_output, reflect_output: of
        the replies. warmup: one Reason and one Reflect of as many agents, phase "warmup", without the Act between.
    timeout_s: a turn is cancelled this long after it was due; None: never.

    cache.gpu is the memory limit, on a CPU too: contexts beyond it are evicted or recomputed, as the baseline does it. A
    turn whose own context does not fit is out of memory: it is refused, counted as oom_turns, and its agent ends.
    """

    def __init__(
        self,
        context: WorkloadContext,
        *,
        agents: Count = 4,
        act_s: NotNegative = 10.0,
        steps: Count = 3,
        reason_tokens: Count = 192,
        reason_output: Count = 32,
        observation_tokens: Count = 64,
        reflect_output: Count = 24,
        timeout_s: Positive | None = None,
    ) -> None:
        self._prompts = {"reason": reason_tokens, "reflect": observation_tokens}
        self._outputs = {"reason": reason_output, "reflect": reflect_output}
        super().__init__(context, timeout_s)
        tokens = steps * (sum(self._prompts.values()) + sum(self._outputs.values()))
        within_memory("agents", agents, 2 * steps, tokens, context.memory_bytes)
        self._agents, self._act_s, self._steps = agents, act_s, steps
        self._warming = agents

    def describe(self) -> WorkloadPlan:
        longest = self._steps * (sum(self._prompts.values()) + sum(self._outputs.values())) - 1
        return WorkloadPlan(
            load="closed",
            sessions=self._agents,
            turns=2 * self._agents * (self._steps + 1),
            working_set_tokens=self._agents * longest,
            warmup_turns=2 * self._agents,
            facts={
                "agents": self._agents,
                "act_s": self._act_s,
                "steps": self._steps,
                # Not "longest_conversation_tokens": running out of memory is something to measure here, not to refuse.
                "longest_context_tokens": longest,
            },
        )

    def start(self) -> Iterable[Arrival]:
        return [self._arrival(f"warmup-{agent}", 1, 0.0) for agent in range(self._agents)]

    def on_finished(self, turn: TurnRecord) -> Iterable[Arrival]:
        assert turn.finished_s is not None
        now = turn.finished_s
        if turn.session.startswith("warmup-"):
            if turn.status == "completed" and turn.turn == 1:
                return [self._arrival(turn.session, 2, now)]
            self._warming -= 1
            return [self._arrival(f"agent-{a}", 1, now) for a in range(self._agents)] if self._warming == 0 else []
        if turn.status != "completed" or turn.turn == 2 * self._steps:
            return []
        acting = turn.turn % 2 == 1
        return [
            self._arrival(turn.session, turn.turn + 1, now + (self._act(turn.session, turn.turn) if acting else 0.0))
        ]

    def foresee(self, session: str, turn: int) -> Following | None:
        if session.startswith("warmup-"):
            return None
        if turn == 2 * self._steps:
            return Following(math.inf)
        return Following(self._act(session, turn) if turn % 2 == 1 else 0.0, ((session, turn + 1),))

    def _act(self, session: str, turn: int) -> float:
        spread = ACT_SPREAD * (uniform(self._context.seed, "act", session, turn) - 0.5)
        return self._act_s * (1.0 + spread)

    def _hint(self, turn: int) -> Hint:
        """What an agent's harness knows: its tool and how long that takes on average; after a reflection it goes on at once,
        after the last one not at all."""
        if turn % 2 == 1:
            return Hint("tool_use", "act", expected_s=self._act_s)
        return Hint("end_turn") if turn == 2 * self._steps else Hint(expected_s=0.0)

    def _arrival(self, session: str, turn: int, at_s: float) -> Arrival:
        stage = STAGES[(turn - 1) % 2]
        prompt, output = prose(self._context, self._prompts[stage], session, turn), Length(self._outputs[stage])
        phase, label = ("warmup", "") if session.startswith("warmup-") else (stage, stage)
        return self._ask(at_s, session, turn, prompt, output, phase, label=label, hint=self._hint(turn))
