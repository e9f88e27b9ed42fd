"""What a prompt finds of its history, and what blocks it takes."""

from __future__ import annotations

from pensieve.cache.base import Demand, Residency
from pensieve.cache.chunk import View
from pensieve.cache.session import Session
from pensieve.units import ceil_div


def residency_of(session: Session, keep: int, prompt: int, known: int | None, chunk_tokens: int) -> Residency:
    """Of a prompt of `prompt` tokens whose first `keep` are the conversation's own; known overrides the history."""
    history = min(keep, session.computed, prompt - 1) if known is None else min(known, prompt - 1)
    gpu_hit = cpu_hit = 0
    found = min(history, keep)
    for index in range(min(len(session.chunks), ceil_div(found, chunk_tokens))):
        chunk, left = session.chunks[index], found - index * chunk_tokens
        on_gpu = min(chunk.gpu_len, left)
        gpu_hit += on_gpu
        cpu_hit += max(0, min(chunk.cpu_len, left) - on_gpu)
    return Residency(prompt, history, gpu_hit, cpu_hit, elsewhere=0, anywhere=history)


def demand_of(session: Session, keep: int, length: int, chunk_tokens: int, cpu_tier: bool, in_flight: bool) -> Demand:
    """Of a prompt of `length` tokens whose first `keep` are the conversation's own.

    in_flight: a plan is launched and not collected, so that the blocks of what is not kept will wait in quarantine.
    """
    total = ceil_div(length + 1, chunk_tokens)  # one more position: the first token decoded must not need a new block
    kept = ceil_div(keep, chunk_tokens)
    own = reserved = 0
    for index, chunk in enumerate(session.chunks if in_flight else session.chunks[:kept]):
        own += index < kept and chunk.gpu is not None
        reserved += chunk.view is View.CLEAN or (not cpu_tier and chunk.view is View.DIRTY)
    return Demand(blocks=total - own, own_available=reserved)
