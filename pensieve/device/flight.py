"""A launched plan until it is collected: what will come back from the device, and the event behind it; how it failed."""

import math
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from pensieve.core.plan import StepPlan
from pensieve.device.sampler import Drawn
from pensieve.units import format_bytes


@dataclass(slots=True)
class Flight:
    """slots: of the sampled rows, in the order of `copied`: their tokens and margins on the host once `ended` is reached.

    began, ended: timing events around the compute, None on a CPU, where compute_ns and ended_ns are known at launch.
    held_ns: for how long the copies held up the caller. logits: kept for tests.
    """

    plan: StepPlan
    slots: tuple[int, ...] = ()
    copied: torch.Tensor | None = None
    began: Any = None
    ended: Any = None
    compute_ns: int = 0
    ended_ns: int | None = None
    held_ns: int = 0
    h2d_bytes: int = 0
    d2h_bytes: int = 0
    error: Exception | None = None
    logits: dict[int, torch.Tensor] = field(default_factory=dict)

    def send(self, slots: tuple[int, ...], drawn: Drawn) -> None:
        """Start the one copy to the host that a step makes: tokens, and margins bit for bit."""
        both = torch.stack([drawn.tokens, drawn.margins.double().view(torch.int64)])
        self.slots = slots
        if both.device.type == "cuda":
            self.copied = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
            self.copied.copy_(both, non_blocking=True)
        else:
            self.copied = both

    def wait(self) -> None:
        """Wait until the device is done with the step. Raises what the device says."""
        if self.ended is not None:
            self.ended.synchronize()
            self.compute_ns = int(self.began.elapsed_time(self.ended) * 1e6)

    def read(self) -> tuple[dict[int, int], dict[int, float], tuple[int, ...]]:
        """Tokens and margins by slot, and the slots whose logits are not finite, which have neither."""
        if self.copied is None:
            return {}, {}, ()
        read = list(zip(self.slots, self.copied[0].tolist(), self.copied[1].view(torch.float64).tolist(), strict=True))
        finite = [(slot, token, margin) for slot, token, margin in read if math.isfinite(margin)]
        tokens = {slot: token for slot, token, _ in finite}
        margins = {slot: margin for slot, _, margin in finite}
        return tokens, margins, tuple(slot for slot in self.slots if slot not in tokens)


def without_frames(failure: Exception) -> Exception:
    """The same exception without its traceback. A traceback keeps the local variables of every function in it: the
    activations of the forward that ran out of memory, and the flight, which in turn keeps the exception; such a cycle is
    freed by the garbage collector only, at some later time."""
    link: BaseException | None = failure
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return failure


def explain(failure: Exception, device: torch.device) -> str:
    """One sentence for the requests that fail with a step."""
    text = (str(failure).strip().splitlines() or [""])[0]
    if isinstance(failure, torch.OutOfMemoryError):
        there = ""
        if device.type == "cuda":
            with suppress(RuntimeError):  # a device in error answers nothing
                unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
                there = f" ({format_bytes(torch.cuda.mem_get_info(device)[0] + unused)} are free)"
            torch.cuda.empty_cache()
        return (
            f"The device ran out of memory in this step{there}; lower scheduler.max_batch_tokens or cache.gpu: {text}"
        )
    return f"The step failed on the device: {type(failure).__name__}: {text}"
