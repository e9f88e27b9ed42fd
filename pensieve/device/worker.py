"""Performs plans with torch, on a CPU or a GPU."""

import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import torch

from pensieve.core.machine import Clock
from pensieve.core.plan import Row, Sample, StartReport, StepPlan, StepResult
from pensieve.device.attention import IMPLEMENTATION, Iteration
from pensieve.device.batch import Batch, BlockTables, build_batch
from pensieve.device.flight import Flight, explain, without_frames
from pensieve.device.graphs import DecodeGraphs
from pensieve.device.kernels.base import CapturingBackend
from pensieve.device.kv_tensors import KvTensors
from pensieve.device.model import LoadedModel
from pensieve.device.sampler import draw
from pensieve.device.transfers.cuda_link import CudaLink, choose_copier
from pensieve.device.transfers.transfer import Link, Transfer
from pensieve.errors import EngineMissing, HardwareMissing
from pensieve.units import ceil_div, format_bytes

_WARMUP_TOKENS = 64
LEAST_BLOCKS = 4
_KEPT_BITS = 6  # sizes are rounded down to so many binary digits, so that a few MB more or less in use change nothing


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """depth: plans in flight, 1 or 2. graphs: replay decode iterations where the device and the attention backend can.

    max_batch_tokens, max_batch_requests: of one iteration. memory_share: of the device's memory, what weights, KV and the
    largest iteration may take together where the KV's size is computed. transfer: what performs the copies; a DiskOptions
    where there is a file store, on a CPU with depth 1 only.
    """

    depth: int = 1
    graphs: bool = True
    max_batch_tokens: int = 512
    max_batch_requests: int = 64
    memory_share: float = 0.9
    transfer: Callable[[KvTensors, Link | None], Transfer] = Transfer


def largest_rows(tokens: int, requests: int, max_context: int) -> tuple[list[Row], list[Row]]:
    """The two iterations that take most memory: one of the longest rows, and one of the most sampled rows. All are rows of
    slot 0, so that they share its blocks; whether the last one is sampled, and of which slot, does not matter. They are
    drawn by chance from a limited set, for which the sampler takes most."""

    def prompt(length: int) -> Row:
        return Row(0, ((0, length),), (0,) * length, Sample(length, temperature=1.0, top_p=0.9, top_k=2))

    longest, many = min(tokens, max_context), min(requests, tokens)
    long = [prompt(min(longest, tokens - start)) for start in range(0, tokens, longest)]
    return long, [prompt(min(longest, tokens // many)) for _ in range(many)]


class TorchWorker:
    """`launch` hands a plan to the device, `collect` waits for the oldest one; on a CPU the launch itself computes.

    A plan's swap-ins are started first, then its swap-outs, then its forward, which waits for the loads it needs, and
    sampling. Copies that outlast their plan are reported by a later `collect`. The token that a slot sampled last stays on
    the device for the next plan, so that nothing but the tokens' copy is ever waited for. An exception on the device
    becomes StepResult.error; tables of that plan stand, its copies are over, and the worker goes on. Where several processes
    have the model together, all perform every plan, rank 0 draws the tokens for all, and an exception in a launch is raised:
    the others wait inside of the forward, and none of them can go on.

    stall_ns is the time for which compute waited for copies: on a CPU all of their time, over a link (a GPU's, or its
    stand-in) the part of the swap-ins that the layers' own work did not cover.

    link: on a CPU, what stands in for copy streams; None: copies are made directly. keep_logits: for tests; last_logits
    then holds the float32 logits [vocab] of every row sampled in the step collected last.
    """

    computes = True

    def __init__(
        self,
        model: LoadedModel,
        chunk_tokens: int,
        clock: Clock,
        keep_logits: bool = False,
        link: Link | None = None,
        options: TorchOptions | None = None,
    ) -> None:
        self.model = model
        self.chunk_tokens = chunk_tokens
        self.options = options or TorchOptions()
        self.depth = self.options.depth
        self.keep_logits = keep_logits
        self.last_logits: dict[int, torch.Tensor] = {}
        self._clock = clock
        self._flights: deque[Flight] = deque()
        self._tables = BlockTables()
        self._last_tokens = torch.zeros(self.options.max_batch_requests, dtype=torch.int64, device=model.device)
        self._tensors: KvTensors | None = None
        self._transfer: Transfer | None = None
        self._graphs: DecodeGraphs | None = None
        self._copies = ""
        self._link = link
        self._reserved: dict[str, int | None] = {"iteration_bytes": None, "standing_bytes": None}

    @property
    def tensors(self) -> KvTensors:
        assert self._tensors is not None, "start() comes first"
        return self._tensors

    @property
    def transfer(self) -> Transfer:
        assert self._transfer is not None, "start() comes first"
        return self._transfer

    def room(self) -> int:
        """GPU blocks that fit beside the weights, and beside what was measured: iteration_bytes, of the largest iteration
        with its sampler, while it runs; standing_bytes, of graphs and their pool, standing plans and libraries' workspaces.
        Only on a GPU, before `start`.

        Raises HardwareMissing with the numbers, also where the iteration itself does not fit.
        """
        model, options, device = self.model, self.options, self.model.device
        assert device.type == "cuda", "on a CPU memory is the machine's, and the configuration decides"
        block_bytes, context = self.chunk_tokens * model.spec.kv_bytes_per_token, model.spec.max_context
        self._synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        blocks = ceil_div(min(options.max_batch_tokens, context), self.chunk_tokens)
        try:
            self._allocate(blocks, 0)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            for rows in largest_rows(options.max_batch_tokens, options.max_batch_requests, context):
                self._try(rows, blocks)
            working = torch.cuda.max_memory_allocated(device) - before
            self._make_graphs(context)  # for rows as long as the model's context: the pool will be larger than this one
            self._synchronize()
            torch.cuda.empty_cache()
            beside = torch.cuda.mem_get_info(device)[0] + blocks * block_bytes  # what stands, stands; the pool will not
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            raise HardwareMissing(self._no_room(free, total, "more than that")) from error
        finally:
            self._free()
        share = int(options.memory_share * total) - (total - beside)
        fit = max(0, min(beside, share) - working) // block_bytes
        spare = max(0, fit.bit_length() - _KEPT_BITS)
        if (fit := fit >> spare << spare) < LEAST_BLOCKS:
            raise HardwareMissing(self._no_room(beside, total, format_bytes(working)))
        self._reserved = {"iteration_bytes": working, "standing_bytes": free - beside}
        return fit

    def _no_room(self, free: int, total: int, needs: str) -> str:
        model, options = self.model, self.options
        return (
            f"cache.gpu=auto finds no room on {model.device}: {format_bytes(free)} of {format_bytes(total)} are free beside "
            f"the weights of {model.spec.name} and other programs. An iteration of {options.max_batch_tokens} tokens needs "
            f"{needs}, and hardware.memory_share={options.memory_share:g} bounds all of it. Lower "
            "scheduler.max_batch_tokens, use a smaller model, or end what else uses the device."
        )

    def start(self, gpu_blocks: int, cpu_blocks: int) -> StartReport:
        """Allocate both tiers, check how to copy between them, run the first forwards, which choose kernels, and record
        graphs. Raises HardwareMissing, EngineMissing."""
        started = perf_counter_ns()
        try:
            self._allocate(gpu_blocks, cpu_blocks)
            self._warm_up(gpu_blocks)
            self._make_graphs(gpu_blocks)
            self._synchronize()  # the streams of the copies do not wait for what was zeroed here
        except (HardwareMissing, EngineMissing):
            self._free()
            raise
        except (torch.OutOfMemoryError, MemoryError) as error:
            sentence = explain(error, self.model.device) if isinstance(error, torch.OutOfMemoryError) else str(error)
            taken = f"{gpu_blocks} GPU blocks of {self.chunk_tokens} tokens" if self._tensors else "the KV pools"
            self._free()
            raise HardwareMissing(f"The first iterations do not fit beside {taken}. {sentence}") from error
        warmup_ms = (perf_counter_ns() - started) / 1e6
        loaded_s = None if self.model.reused else self.model.load_s
        model, moves = self.model, self.transfer
        told = (self.settings(), model.eos_token_ids, moves.below_load_s, moves.below_kept, model.sampling)
        return StartReport(loaded_s, warmup_ms, *told)

    def settings(self) -> dict[str, Any]:
        """What runs, as torch and transformers themselves report it."""
        import transformers

        model, tensors, graphs = self.model, self._tensors, self._graphs
        on_gpu = model.device.type == "cuda"
        return {
            "engine": "torch",
            "device": torch.cuda.get_device_name(model.device) if on_gpu else "cpu",
            "ranks": 1 if model.ranks is None else model.ranks.count,
            "collectives": "none" if model.ranks is None else model.ranks.backend,
            "dtype": str(model.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "wait_policy": os.environ.get("OMP_WAIT_POLICY"),
            "depth": self.depth,
            "graphs": "off" if graphs is None else graphs.note or "on",
            "graph_buckets": [] if graphs is None else list(graphs.buckets),
            "attention": IMPLEMENTATION,
            **model.served(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "weights": model.weights,
            "model_reused": model.reused,
            "model_load_s": model.load_s,
            "revision": model.revision,
            "chunk_tokens": self.chunk_tokens,
            "gpu_pool_bytes": tensors.gpu_bytes if tensors else 0,
            "cpu_pool_bytes": tensors.cpu_bytes if tensors else 0,
            **self._reserved,
            "copies": self._copies,
            "disk_load_s": self._transfer.below_load_s if self._transfer else 0.0,
        }

    def launch(self, plan: StepPlan) -> None:
        """Hand the plan to the device."""
        assert len(self._flights) < self.depth, "collect a plan before"
        flight = Flight(plan)
        self._flights.append(flight)
        transfer = self.transfer
        h2d, d2h = transfer.h2d_bytes, transfer.d2h_bytes
        for slot, first_chunk, blocks in plan.tables:
            self._tables.overwrite(slot, first_chunk, blocks)
        try:
            with torch.inference_mode():
                flight.held_ns = transfer.begin(plan)
                if plan.rows:
                    self._start(flight)
        except Exception as failure:  # anything the device or the model's code raises fails this step only
            if self.model.ranks is not None:
                raise
            flight.error = without_frames(failure)
        flight.h2d_bytes, flight.d2h_bytes = transfer.h2d_bytes - h2d, transfer.d2h_bytes - d2h

    def collect(self, until_ns: int | None) -> StepResult | None:
        """Wait for the oldest plan, else for a copy under way; None if there is neither. Nothing is cut at `until_ns`."""
        if not self._flights:
            transfer = self._transfer
            if transfer is None or not transfer.wait():
                return None
            return StepResult(None, moved=transfer.moved())
        return self._land(self._flights.popleft())

    def forget(self) -> None:
        assert not self._flights, "what is under way writes to the blocks"
        self.tensors.forget()

    def close(self) -> None:
        """Free the pools, once what is to be on disk is there; the model stays with whoever loaded it."""
        self._free()

    # -- how ----------------------------------------------------------------------------------------------------------

    def _start(self, flight: Flight) -> None:
        """Enqueue forward, sampling and the copy of the tokens; on a CPU, do them."""
        on_gpu, rows = self.model.device.type == "cuda", flight.plan.rows
        batch = build_batch(rows, self._tables, self.chunk_tokens, self.model.device)
        started = perf_counter_ns()
        if batch.unseen is not None:
            places, slots = batch.unseen
            batch.token_ids.index_copy_(0, places, self._last_tokens.index_select(0, slots))
        if on_gpu:
            compute = torch.cuda.current_stream(self.model.device)
            flight.began, flight.ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flight.began.record(compute)
        logits = self._forward(batch)
        if batch.sampled:
            self._sample(flight, batch, logits)
        if on_gpu:
            flight.ended.record(compute)
        else:
            flight.compute_ns = perf_counter_ns() - started
            flight.ended_ns = self._clock.now_ns()

    def _sample(self, flight: Flight, batch: Batch, logits: torch.Tensor) -> None:
        ranks, slots = self.model.ranks, tuple(slot for slot, _ in batch.sampled)
        drawn = draw(logits, batch.draws) if ranks is None or ranks.first else None
        tokens = self._last_tokens.new_zeros(len(slots)) if drawn is None else drawn.tokens
        if ranks is not None:
            tokens = ranks.agree(tokens.contiguous())
        self._make_room_for(max(slots))
        assert batch.sampled_slots is not None
        self._last_tokens.index_copy_(0, batch.sampled_slots, tokens)
        if drawn is not None:
            flight.send(slots, drawn)
        if self.keep_logits:
            flight.logits = {slot: row.float().cpu().clone() for slot, row in zip(slots, logits, strict=True)}

    def _land(self, flight: Flight) -> StepResult:
        transfer, plan = self.transfer, flight.plan
        tokens: dict[int, int] = {}
        margins: dict[int, float] = {}
        not_finite: tuple[int, ...] = ()
        error: str | None = None
        failure = flight.error
        if failure is None:
            try:
                flight.wait()
                tokens, margins, not_finite = flight.read()
            except Exception as raised:  # of a kernel that failed since the launch
                failure = without_frames(raised)
        if failure is not None:
            error = explain(failure, self.model.device)
            transfer.abandon([move.ticket for move in plan.moves])
        if self.keep_logits and flight.logits:
            self.last_logits = flight.logits
        waited_ns = transfer.stalled_ns()
        ended_ns = self._clock.now_ns() if flight.ended_ns is None else flight.ended_ns
        return StepResult(
            step=plan.step,
            tokens=tokens,
            margins=margins,
            not_finite=not_finite,
            ended_ns=ended_ns if plan.rows else None,
            moved=transfer.moved(),
            compute_ns=max(0, flight.compute_ns - waited_ns),
            stall_ns=flight.held_ns + waited_ns,
            h2d_bytes=flight.h2d_bytes,
            d2h_bytes=flight.d2h_bytes,
            error=error,
        )

    def _forward(self, batch: Batch) -> torch.Tensor:
        """Logits [sampled rows, vocab]; those of one position, unused, where no row is sampled."""
        transfer = self.transfer
        waits = transfer.require(batch.spans.blocks)
        if self._graphs is not None and self._graphs.takes(batch):
            if waits:  # a graph cannot wait in the middle; layers are loaded in order
                transfer.wait_for_layer(self.tensors.layers - 1)
            logits = self._graphs.run(batch)
            whole = len(batch.sampled) == len(batch.spans)  # then they are in this order already
            return logits if whole else logits.index_select(0, batch.logits_at)
        iteration = Iteration(
            batch, self.tensors.gpu_tokens(), self.chunk_tokens, transfer.wait_for_layer, self.model.attention
        )
        wanted = batch.logits_at if batch.sampled else batch.token_ids.new_zeros(1)
        return self.model.forward(iteration, wanted)

    def _make_room_for(self, slot: int) -> None:
        if slot >= len(self._last_tokens):
            longer = self._last_tokens.new_zeros(2 * slot + 1)
            longer[: len(self._last_tokens)] = self._last_tokens
            self._last_tokens = longer

    # -- start and end ------------------------------------------------------------------------------------------------

    def _allocate(self, gpu_blocks: int, cpu_blocks: int) -> None:
        """Graphs have a scratch block, behind all others."""
        model, blocks = self.model, gpu_blocks + (self._capturing is not None)
        self._tensors = KvTensors(model.spec, self.chunk_tokens, blocks, cpu_blocks, model.device, model.dtype)
        link = self._link
        if link is None and model.device.type == "cuda":
            copier, self._copies = choose_copier(self._tensors) if cpu_blocks else (None, "")
            link = CudaLink(model.device, copier)
        self._transfer = self.options.transfer(self._tensors, link)

    def _free(self) -> None:
        self._flights.clear()
        if self._transfer is not None:
            self._transfer.close()
        self._tensors = self._transfer = self._graphs = None
        self._tables, self.last_logits = BlockTables(), {}
        if self.model.device.type == "cuda":
            with suppress(RuntimeError):  # a device in error gives nothing back
                torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)

    def _warm_up(self, gpu_blocks: int) -> None:
        """A prefill and a decode of one token, greedy and by chance, in block 0 and on; what they wrote is zeroed."""
        longest = min(_WARMUP_TOKENS, gpu_blocks * self.chunk_tokens, self.model.spec.max_context) - 1
        chunks = -(-(longest + 1) // self.chunk_tokens)
        samples = (Sample(longest + 1), Sample(longest + 1, temperature=1.0, top_p=0.9, top_k=2))
        rows = [Row(0, ((longest, longest + 1),), (0,), sample) for sample in samples]
        if longest > 0:
            rows.insert(0, Row(0, ((0, longest),), (0,) * longest, None))
        for row in rows:
            self._try([row], chunks)
        self.tensors.gpu[:, :chunks].zero_()

    def _try(self, rows: Sequence[Row], blocks: int) -> None:
        """Run an iteration of slot 0 in the first blocks, and keep nothing of it; what it wrote to them stays."""
        tables = BlockTables()
        tables.overwrite(0, 0, range(blocks))
        with torch.inference_mode():
            batch = build_batch(rows, tables, self.chunk_tokens, self.model.device)
            logits = self._forward(batch)
            if batch.sampled:
                draw(logits, batch.draws)
        self._synchronize()

    @property
    def _capturing(self) -> CapturingBackend | None:
        """What decode iterations are recorded with, where they are to be and can be."""
        backend, asked = self.model.attention, self.options.graphs and self.model.device.type == "cuda"
        return backend if asked and isinstance(backend, CapturingBackend) else None

    def _make_graphs(self, blocks: int) -> None:
        """blocks: of the pool that a row can have."""
        backend, tensors = self._capturing, self.tensors
        if backend is None:
            return
        with torch.inference_mode():
            self._graphs = DecodeGraphs(
                self.model.forward,
                backend,
                tensors.gpu_tokens(),
                self.chunk_tokens,
                scratch=tensors.gpu_blocks - 1,
                most_rows=min(self.options.max_batch_requests, self.options.max_batch_tokens),
                max_blocks=min(ceil_div(self.model.spec.max_context, self.chunk_tokens), blocks),
            )
