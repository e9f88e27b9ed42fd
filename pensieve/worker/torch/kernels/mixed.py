"""A library's kernel for prompts and this project's for decode rows, in one plan.

Libraries have kernels for prompts that a GPU's vendor tuned; decode rows want a plan that a graph can replay, which theirs
is not. Spans of one query come first in a batch, so each side computes one range of rows of one output.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from pensieve.worker.torch.batch import Batch, Spans
from pensieve.worker.torch.kernels.base import AttentionBackend, PartPlan, StandingPlan
from pensieve.worker.torch.kernels.triton_backend import TritonBackend


class MixedPlan:
    """decodes: of the rows before `cut`, in units of queries; prompts: of the others. None where there are no such rows."""

    def __init__(self, cut: int, decodes: PartPlan | None, prompts: PartPlan | None) -> None:
        self._cut, self._decodes, self._prompts = cut, decodes, prompts

    def write(self, pool: torch.Tensor, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """All tokens at once: either side knows how to write any."""
        plan = self._decodes or self._prompts
        assert plan is not None, "a batch has rows"
        plan.write(pool, places, keys, values)

    def attend(
        self,
        pool: torch.Tensor,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        output = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        cut = self._cut
        for plan, rows in ((self._decodes, slice(0, cut)), (self._prompts, slice(cut, None))):
            if plan is not None:
                plan.attend_into(
                    output[rows], pool, queries[rows], keys[rows], values[rows], scaling, window, softcap
                )  # fmt: skip
        return output


class MixedBackend:
    """prompts: a backend whose plans are PartPlans. Iterations of decode rows alone are planned, and recorded in graphs, as
    they would be without it."""

    captures = True

    def __init__(self, prompts: AttentionBackend, decodes: TritonBackend) -> None:
        self._prompts, self._decodes = prompts, decodes
        self.name = f"{prompts.name}+{decodes.name}"

    @property
    def version(self) -> str:
        return f"{self._prompts.version} + {self._decodes.version}"

    def plan(self, batch: Batch, pool: torch.Tensor, chunk_tokens: int) -> MixedPlan:
        single, several = Spans.of(batch.spans).divided()
        decodes = self._decodes.plan(replace(batch, spans=single), pool, chunk_tokens) if len(single) else None
        prompts = self._prompts.plan(replace(batch, spans=several), pool, chunk_tokens) if len(several) else None
        assert prompts is None or isinstance(prompts, PartPlan)
        return MixedPlan(len(single), decodes, prompts)

    def standing(self, pool: torch.Tensor, chunk_tokens: int, rows: int, max_blocks: int) -> StandingPlan:
        return self._decodes.standing(pool, chunk_tokens, rows, max_blocks)
