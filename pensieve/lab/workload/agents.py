"""Agents that reason, act in the world outside, and reflect on what came of it."""

from __future__ import annotations

from pensieve.core.request import Hint
from pensieve.lab.workload.base import Count, NotNegative, Positive, WorkloadContext
from pensieve.lab.workload.chance import uniform
from pensieve.lab.workload.playback import Dialogue, Playback, Users
from pensieve.lab.workload.prose import prose

ACT_SPREAD = 0.2


class AgentsWorkload(Playback):
    """N agents on one engine (load "closed"), each a conversation that goes through `steps` rounds of three stages.

    Reason sends a prompt; Act waits for the world, `act_s` seconds give or take a tenth, and asks the model nothing;
    Reflect sends only what the world answered, and its context is everything said before. The next Reason follows the
    reflection at once. Each turn carries its stage as phase and label, and as a hint the tool and its mean seconds. One
    Reason and one Reflect of as many agents, without the Act between, are the warm-up.

    cache.gpu is the memory limit, on a CPU too: contexts beyond it are evicted or recomputed, as the baseline does it. A
    turn whose own context does not fit is out of memory: it is refused, counted as oom_turns, and its agent ends.
    Fields: conf/workload/agents.yaml.
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
        stages = {"reason": (reason_tokens, reason_output), "reflect": (observation_tokens, reflect_output)}

        def hint(turn: int) -> Hint:
            """What an agent's harness knows: its tool and how long that takes on average; after a reflection it goes on at
            once, after the last one not at all."""
            if turn % 2:
                return Hint("tool_use", "act", expected_s=act_s)
            return Hint("end_turn") if turn == 2 * steps else Hint(expected_s=0.0)

        def written(session: str, rounds: int, warmup: bool = False) -> Dialogue:
            turns = []
            for turn, stage in enumerate(list(stages) * rounds, start=1):
                tokens, reply = stages[stage]
                own = {} if warmup else {"phase": stage, "label": stage}
                turns.append((prose(context, tokens, session, turn), reply, {"hint": hint(turn), **own}))
            return Dialogue.written(session, "warmup" if warmup else "agent", turns)

        def pause_s(agent: Dialogue, turn: int) -> float:
            spread = ACT_SPREAD * (uniform(context.seed, "act", agent.session, turn) - 0.5)
            return act_s * (1.0 + spread) if turn % 2 else 0.0

        measured = [written(f"agent-{agent}", steps) for agent in range(agents)]
        facts = {
            "agents": agents,
            "act_s": act_s,
            "steps": steps,
            "longest_context_tokens": measured[0].longest,
            "longest_conversation_tokens": None,  # out of memory is something to measure here, not to refuse
        }
        warmup = [written(f"warmup-{agent}", 1, warmup=True) for agent in range(agents)]
        super().__init__(
            context, warmup, measured, Users.dealt(measured, agents), pause_s, timeout_s=timeout_s, facts=facts
        )
