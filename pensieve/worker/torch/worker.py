"""Performs plans with torch, on a CPU or a GPU."""

from __future__ import annotations

import math
from time import perf_counter_ns
from typing import Any

import torch

from pensieve.clock import Clock
from pensieve.plan import Row, Sample, StartReport, StepPlan, StepResult
from pensieve.worker.torch.attention import IMPLEMENTATION, Iteration
from pensieve.worker.torch.batch import Batch, BlockTables, build_batch
from pensieve.worker.torch.kv_tensors import KvTensors
from pensieve.worker.torch.model import LoadedModel
from pensieve.worker.torch.sampler import draw
from pensieve.worker.torch.transfer import Transfer

_WARMUP_TOKENS = 64


class TorchWorker:
    """A synchronous worker: `launch` takes a plan, `collect` performs it and returns when all of it is done.

    A plan's swap-ins come first, then its forward and sampling, then its swap-outs. An exception on the device becomes
    StepResult.error; tables and copies of that plan stand, and the worker goes on.

    stall_ns is the time for which compute waited for copies: on a CPU all of their time, on a GPU the part of the
    swap-ins that the layers' own work did not cover.

    keep_logits: for tests; last_logits then holds the float32 logits [vocab] of every row sampled in the last step.
    """

    depth = 1

    def __init__(self, model: LoadedModel, chunk_tokens: int, clock: Clock, keep_logits: bool = False) -> None:
        self.model = model
        self.chunk_tokens = chunk_tokens
        self.keep_logits = keep_logits
        self.last_logits: dict[int, torch.Tensor] = {}
        self._clock = clock
        self._pending: StepPlan | None = None
        self._tables = BlockTables()
        self._last_token: dict[int, int] = {}
        self._tensors: KvTensors | None = None
        self._transfer: Transfer | None = None

    @property
    def tensors(self) -> KvTensors:
        assert self._tensors is not None, "start() comes first"
        return self._tensors

    @property
    def transfer(self) -> Transfer:
        assert self._transfer is not None, "start() comes first"
        return self._transfer

    def start(self, gpu_blocks: int, cpu_blocks: int) -> StartReport:
        """Allocate both tiers and run the first forwards, which choose kernels. Raises HardwareMissing."""
        started = perf_counter_ns()
        model = self.model
        self._tensors = KvTensors(model.spec, self.chunk_tokens, gpu_blocks, cpu_blocks, model.device, model.dtype)
        self._transfer = Transfer(self._tensors)
        self._warm_up()
        return StartReport(model.load_s, (perf_counter_ns() - started) / 1e6, self.settings())

    def settings(self) -> dict[str, Any]:
        """What runs, as torch and transformers themselves report it."""
        import transformers

        model, tensors = self.model, self._tensors
        on_gpu = model.device.type == "cuda"
        return {
            "engine": "torch",
            "device": torch.cuda.get_device_name(model.device) if on_gpu else "cpu",
            "dtype": str(model.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "forward": model.forward.name,
            "forward_note": model.forward_note,
            "attention": IMPLEMENTATION,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "weights": model.weights,
            "revision": model.revision,
            "self_check_difference": model.self_check_difference,
            "chunk_tokens": self.chunk_tokens,
            "gpu_pool_bytes": tensors.gpu_bytes if tensors else 0,
            "cpu_pool_bytes": tensors.cpu_bytes if tensors else 0,
            "mean_fragment_bytes": self._transfer.mean_fragment_bytes if self._transfer else 0.0,
        }

    def launch(self, plan: StepPlan, horizon_ns: int | None) -> None:
        """Take the plan. A repeat is ignored: a real step ends when it ends."""
        assert self._pending is None, "depth 1: collect the plan before"
        self._pending = plan

    def collect(self, until_ns: int | None) -> StepResult | None:
        """Perform the launched plan; None if there is none. A step is not cut at `until_ns`."""
        plan, self._pending = self._pending, None
        if plan is None:
            return None
        with torch.inference_mode():
            return self._perform(plan)

    def close(self) -> None:
        """Free the pools; the model stays with whoever loaded it."""
        self._tensors = self._transfer = self._pending = None
        self._tables, self._last_token, self.last_logits = BlockTables(), {}, {}
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _perform(self, plan: StepPlan) -> StepResult:
        transfer = self.transfer
        h2d, d2h = transfer.h2d_bytes, transfer.d2h_bytes
        for slot, first_chunk, blocks in plan.tables:
            self._tables.overwrite(slot, first_chunk, blocks)
        tokens: dict[int, int] = {}
        margins: dict[int, float] = {}
        error, computed_ns = None, 0
        stalled_ns = transfer.swap_in(plan.swap_in)
        if plan.rows:
            batch = build_batch(plan.rows, self._tables, self._last_token, self.chunk_tokens, self.model.device)
            started = perf_counter_ns()
            try:
                tokens, margins = self._compute(batch)
            except Exception as failure:  # anything the device or the model's code raises fails this step only
                error = self._explain(failure)
            computed_ns = perf_counter_ns() - started
        stalled_ns += transfer.swap_out(plan.swap_out)
        waited_ns = transfer.finish()
        return StepResult(
            step=plan.step,
            tokens=tokens,
            margins=margins,
            ended_ns=(self._clock.now_ns(),) if plan.rows else (),
            done=tuple(copy.ticket for copy in (*plan.swap_in, *plan.swap_out)),
            compute_ns=max(0, computed_ns - waited_ns),
            stall_ns=stalled_ns + waited_ns,
            h2d_bytes=transfer.h2d_bytes - h2d,
            d2h_bytes=transfer.d2h_bytes - d2h,
            error=error,
        )

    def _compute(self, batch: Batch) -> tuple[dict[int, int], dict[int, float]]:
        """Forward and sampling; the tokens come back as integers, so the device is done with the forward."""
        logits = self._forward(batch)
        if not batch.sampled:
            if self.model.device.type == "cuda":
                torch.cuda.current_stream(self.model.device).synchronize()
            return {}, {}
        slots = [slot for slot, _ in batch.sampled]
        drawn = draw(logits, [sample for _, sample in batch.sampled])
        if not all(math.isfinite(margin) for margin in drawn.margins):
            raise FloatingPointError("the logits are not finite")
        tokens = dict(zip(slots, drawn.tokens, strict=True))
        self._last_token.update(tokens)
        if self.keep_logits:
            self.last_logits = {slot: row.float().cpu() for slot, row in zip(slots, logits, strict=True)}
        return tokens, dict(zip(slots, drawn.margins, strict=True))

    def _forward(self, batch: Batch) -> torch.Tensor:
        """Logits [sampled rows, vocab]; those of one position, unused, where no row is sampled."""
        transfer = self.transfer
        iteration = Iteration(batch, self.tensors.gpu_tokens(), self.chunk_tokens, transfer.wait_for_layer)
        wanted = batch.logits_at if batch.sampled else batch.token_ids.new_zeros(1)
        return self.model.forward(iteration, wanted)

    def _warm_up(self) -> None:
        """A prefill and a decode of one token, in block 0 and on; what they wrote is zeroed."""
        longest = min(_WARMUP_TOKENS, self.tensors.gpu_blocks * self.chunk_tokens, self.model.spec.max_context) - 1
        chunks = -(-(longest + 1) // self.chunk_tokens)
        tables = BlockTables()
        tables.overwrite(0, 0, range(chunks))
        rows = [Row(0, ((longest, longest + 1),), (0,), Sample(longest + 1))]
        if longest > 0:
            rows.insert(0, Row(0, ((0, longest),), (0,) * longest, None))
        with torch.inference_mode():
            for row in rows:
                self._compute(build_batch([row], tables, {}, self.chunk_tokens, self.model.device))
            self.tensors.gpu[:, :chunks].zero_()
        self._last_token, self.last_logits = {}, {}
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)

    def _explain(self, failure: Exception) -> str:
        if isinstance(failure, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
            return "The device ran out of memory in this step; lower scheduler.max_batch_tokens or cache.gpu."
        text = (str(failure).strip().splitlines() or [""])[0]
        return f"The step failed on the device: {type(failure).__name__}: {text}"
