"""What is copied to the CPU tier before its GPU block is needed, and how `auto` chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CopyAhead = Literal["paper", "spare", "never"]
"""paper: a share of the GPU blocks, whatever must be dropped from the CPU for it (section 4.3.2). spare: as much, but only
into CPU blocks that no chunk has its only copy in. never: nothing, so that the tiers hold different chunks; what returns from
the CPU changes places with what leaves the GPU."""

AskedCopyAhead = Literal["auto", "paper", "spare", "never"]

WORTH_HIDING = 0.5
"""Of the time of the copies. Where less passes beside the compute, an iteration loses more by copies that are made ahead of
time than a request would wait for those that it needs: not all that are made are needed."""


@dataclass(frozen=True, slots=True)
class CopyChoice:
    """mode: what the scheduler does. note: why, where auto chose; else empty."""

    mode: CopyAhead
    note: str = ""


def choose_copy_ahead(
    asked: AskedCopyAhead, cpu_blocks: int, one_memory: bool, hidden: float | None, kept_clean: int = 0
) -> CopyChoice:
    """one_memory: both tiers are the same memory. hidden: the share of the copies' time that passes beside an iteration, as
    measured; None: not measured. kept_clean: GPU blocks that the paper's mode keeps free or clean.

    A CPU tier of fewer blocks than those cannot hold their copies: the paper's mode then drops chunks from the GPU ahead of
    time to keep the others free, and both tiers together hold less than the GPU alone (G - kept_clean + C blocks of G).
    """
    if asked != "auto":
        return CopyChoice(asked)
    if not cpu_blocks:
        return CopyChoice("paper", "there is no CPU tier to copy to")
    choice = _by_link(one_memory, hidden)
    if choice.mode == "paper" and cpu_blocks < kept_clean:
        held = f"the CPU tier holds {cpu_blocks} blocks, fewer than the {kept_clean} of the GPU tier that would be kept clean"
        return CopyChoice("spare", held)
    return choice


def _by_link(one_memory: bool, hidden: float | None) -> CopyChoice:
    if not one_memory:
        return CopyChoice("paper", "the CPU tier is another memory")
    if hidden is None:
        return CopyChoice("paper", "both tiers are one memory, and what copies cost there was not measured")
    share = f"both tiers are one memory, and {hidden:.0%} of the time of copies passes beside an iteration"
    return CopyChoice("paper" if hidden >= WORTH_HIDING else "never", share)
