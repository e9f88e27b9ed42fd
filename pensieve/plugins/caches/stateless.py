"""The baseline that forgets: all KV is released when a turn ends (vLLM without prefix caching)."""

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.policies.base import EvictionPolicy
from pensieve.core.session import Session


class StatelessCache(TwoTierCache):
    """Every turn recomputes its whole prompt. There is no CPU tier, whatever the configuration gives it.

    A preempted request keeps its KV as long as nobody else needs the blocks, as in every baseline.
    """

    def __init__(self, *, policy: EvictionPolicy, chunk_tokens: int, gpu_blocks: int, cpu_blocks: int = 0) -> None:
        super().__init__(policy=policy, chunk_tokens=chunk_tokens, gpu_blocks=gpu_blocks, cpu_blocks=0)

    def release(self, session: Session, now_s: float, finished: bool = True) -> None:
        super().release(session, now_s, finished)
        if finished:
            self.tiers.discard(session.leaf, 0)
