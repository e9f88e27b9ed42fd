"""Attention alone: decode, append, mixed and recovery batches, and the paper's microbenchmark, beside every backend here.

One call attends in several layers, enough that their KV does not fit the caches. The plan is made before, as a forward makes
one for all its layers. On a GPU the call is replayed from a CUDA graph where the backend can be captured, so that no time of
launches is measured. The limit is the time to move the KV at the copy bandwidth, or to do the products at the matrix rate,
whichever is longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pensieve.bench.case import Case, Figure, Measured
from pensieve.bench.kernel_inputs import Inputs, Runs, Shape, contiguous, copied_out, make_inputs, one_at_a_time, paged
from pensieve.bench.record import now
from pensieve.bench.session import Bench
from pensieve.bench.timer import interleaved
from pensieve.errors import PensieveError
from pensieve.statistics import median
from pensieve.worker.torch.graphs import CudaRecorder
from pensieve.worker.torch.kernels.base import AttentionBackend
from pensieve.worker.torch.kernels.choose import BACKENDS, ON_CPU, load_backend, order

Call = Callable[[], torch.Tensor]

_GPU_SHAPE = Shape(heads=32, kv_heads=8, dim=128, chunk=32)
_CPU_SHAPE = Shape(heads=8, kv_heads=4, dim=64, chunk=32)
_ROUNDS = {"cuda": 15, "cpu": 7}


@dataclass(frozen=True, slots=True)
class Backends:
    """ours: the one that serves on this device. others: those that load too. absent: those that do not, with the reason."""

    ours: AttentionBackend
    others: tuple[AttentionBackend, ...]
    absent: dict[str, str]


@dataclass
class Runners:
    """The calls of one case, and for each the version and settings that are recorded."""

    device: torch.device
    calls: dict[str, Call] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, name: str, call: Call, version: str, **engine: Any) -> None:
        replay = _captured(call, self.device)
        self.calls[name] = replay or call
        self.versions[name] = version
        self.engines[name] = {**engine, "captured": replay is not None}


def run(bench: Bench) -> None:
    """Measure and record all cases. Raises a PensieveError where the backend that serves here cannot be loaded."""
    shape = _GPU_SHAPE if bench.on_gpu else _CPU_SHAPE
    backends = find_backends(bench.device, bench.dtype, shape)
    for label, rows, parameters in plain_cases(bench.on_gpu, bench.full):
        _plain(bench, shape, backends, label, rows, parameters)
    _recovery(bench, shape, backends)
    _microbenchmark(bench, shape, backends)
    ours = f"{backends.ours.name} ({backends.ours.version})"
    bench.note(f"Attention of {shape.heads} query and {shape.kv_heads} KV heads of {shape.dim}; ours is {ours}.")
    if not bench.on_gpu:
        bench.note("On a CPU the sizes are smaller, and varlen, flashinfer and triton do not run.")


def find_backends(device: torch.device, dtype: torch.dtype, shape: Shape) -> Backends:
    """Every backend for this kind of device: those that load, and why others do not."""
    found: dict[str, AttentionBackend] = {}
    absent: dict[str, str] = {}
    for name in ON_CPU if device.type == "cpu" else (name for name in BACKENDS if name != "native"):
        try:
            found[name] = load_backend(name, device, dtype, shape.dim, shape.chunk)
        except PensieveError as error:
            absent[name] = str(error)
    ours = next(found[name] for name in order("auto", device) if name in found)
    return Backends(ours, tuple(b for b in found.values() if b is not ours), absent)


def plain_cases(on_gpu: bool, full: bool) -> list[tuple[str, list[Runs], dict[str, Any]]]:
    """(label, rows, parameters): rows as runs of positions."""
    if on_gpu:
        decodes = [(batch, context) for batch in (1, 64) for context in (1024, 4096, 16384)]
        append, over, mixed, mixed_over, prefill = 8, 4096, 56, 2048, 512
    else:
        decodes = [(1, 1024), (8, 512)] + ([(1, 4096), (8, 2048)] if full else [])
        append, over, mixed, mixed_over, prefill = 2, 512, 7, 256, 128
    cases: list[tuple[str, list[Runs], dict[str, Any]]] = [
        (
            f"decode {batch} over {context}",
            [[(context - 1, context)]] * batch,
            {"kind": "decode", "batch": batch, "context": context, "new": 1},
        )
        for batch, context in decodes
    ]
    cases.append(
        (
            f"append {append} x 32 over {over}",
            [[(over, over + 32)]] * append,
            {"kind": "append", "batch": append, "context": over, "new": 32},
        )
    )
    cases.append(
        (
            f"mixed: {mixed} decode over {mixed_over}, prefill {prefill}",
            [*([[(mixed_over - 1, mixed_over)]] * mixed), [(0, prefill)]],
            {"kind": "mixed", "batch": mixed + 1, "context": mixed_over, "new": prefill},
        )
    )
    return cases


def recovery_runs(context: int, runs: int, tokens: int) -> tuple[Runs, Runs]:
    """`runs` runs of `tokens` positions, ending at equal shares of a context, and one run with as many pairs of query and
    key: the difference in time is what it costs that there are several runs."""
    step = context // runs
    several = [(step * (i + 1) - tokens, step * (i + 1)) for i in range(runs)]
    wanted = sum(pairs(start, stop) for start, stop in several)
    total = runs * tokens
    stop = round((wanted + total * (total - 1) / 2) / total)
    return several, [(stop - total, stop)]


def pairs(start: int, stop: int) -> int:
    """How many (query, key) pairs positions [start, stop) attend to."""
    return (stop - start) * (start + 1 + stop) // 2


def _plain(
    bench: Bench, shape: Shape, backends: Backends, label: str, rows: list[Runs], parameters: Mapping[str, Any]
) -> None:
    inputs = make_inputs(rows, shape, bench.device, bench.dtype, bench.options.seed)
    runners = _paged_runners(inputs, backends)
    runners.add("copied_out", copied_out(inputs), f"torch {torch.__version__}")
    if inputs.uniform:
        runners.add("contiguous", contiguous(inputs), f"torch {torch.__version__}")
    _record(bench, _case(bench, inputs, label, parameters), runners, backends)


def _recovery(bench: Bench, shape: Shape, backends: Backends) -> None:
    context, runs, tokens = (4096, 4, 256) if bench.on_gpu else (512, 4, 32)
    several, one = recovery_runs(context, runs, tokens)
    inputs = make_inputs([several], shape, bench.device, bench.dtype, bench.options.seed)
    runners = _paged_runners(inputs, backends)
    runners.add("copied_out", copied_out(inputs), f"torch {torch.__version__}")
    # As many layers as the several runs had: the caches see the same.
    alone = make_inputs([one], shape, bench.device, bench.dtype, bench.options.seed, layers=inputs.layers)
    runners.add("one_run", paged(backends.ours, alone), backends.ours.version, backend=backends.ours.name)
    label = f"recovery: {runs} runs of {tokens} in {context}"
    parameters = {"kind": "recovery", "batch": 1, "context": context, "new": tokens, "runs": runs}
    _record(bench, _case(bench, inputs, label, parameters), runners, backends, over=("one_run", "several_over_one"))


def _microbenchmark(bench: Bench, shape: Shape, backends: Backends) -> None:
    batch, new, past = (32, 8, 2048) if bench.on_gpu or bench.full else (4, 8, 512)
    inputs = make_inputs([[(past, past + new)]] * batch, shape, bench.device, bench.dtype, bench.options.seed)
    runners = _paged_runners(inputs, backends)
    torch_version = f"torch {torch.__version__}"
    runners.add("contiguous", contiguous(inputs), torch_version)
    runners.add("copied_out", copied_out(inputs), torch_version)
    runners.add(
        "one_at_a_time", one_at_a_time(backends.ours, inputs), backends.ours.version, backend=backends.ours.name
    )
    label = f"paper: batch {batch}, {new} queries, {past} past"
    parameters = {"kind": "paper", "batch": batch, "context": past, "new": new}
    _record(bench, _case(bench, inputs, label, parameters), runners, backends)


def _paged_runners(inputs: Inputs, backends: Backends) -> Runners:
    runners = Runners(inputs.pool.device)
    for name, backend in (("ours", backends.ours), *((other.name, other) for other in backends.others)):
        runners.add(name, paged(backend, inputs), backend.version, backend=backend.name, layers=inputs.layers)
    return runners


def _case(bench: Bench, inputs: Inputs, label: str, parameters: Mapping[str, Any]) -> Case:
    shape, layers = inputs.shape, inputs.layers
    moved = inputs.kv_bytes + 2 * inputs.queries.nbytes  # keys and values once each, queries in, results out
    products = 4 * shape.heads * shape.dim * sum(pairs(span.start, span.stop) for span in inputs.batch.spans)
    memory_ms = moved * layers / bench.copy_bytes_s * 1e3
    matrix_ms = products * layers / bench.matrix_flops_s * 1e3
    return Case(
        label=label,
        floor=max(memory_ms, matrix_ms),
        floor_is="KV at the copy bandwidth" if memory_ms >= matrix_ms else "products at the matrix rate",
        metric="attention_ms",
        parameters={
            **parameters,
            "layers": layers,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "head_dim": shape.dim,
        },
    )


def _record(
    bench: Bench, case: Case, runners: Runners, backends: Backends, over: tuple[str, str] | None = None
) -> None:
    """Measure and record a case. over: a backend of the case, and the name of the figure for our time over its time."""
    began = now()
    with torch.inference_mode():
        times = interleaved(runners.calls, bench.rounds(_ROUNDS[bench.device.type]), bench.device)
    figures: Sequence[Figure] = ()
    if over is not None and times["ours"].values and times[over[0]].values:
        figures = [Figure(over[1], median(times["ours"].values) / median(times[over[0]].values), "x")]
    measured = [
        Measured(
            name,
            t.values,
            runners.versions[name],
            runners.engines[name],
            figures=figures if name == "ours" else (),
            error=t.error,
        )
        for name, t in times.items()
    ]
    measured += [Measured(name, error=reason) for name, reason in backends.absent.items()]
    bench.record(case, measured, began)


def _captured(call: Call, device: torch.device) -> Call | None:
    """The call as the replay of a CUDA graph; None on a CPU, and where it cannot be captured."""
    if device.type != "cuda":
        return None
    try:
        with torch.inference_mode():
            return CudaRecorder(device).record(call)
    except Exception:  # one that waits for the device cannot be captured; one that always raises is recorded when timed
        torch.cuda.synchronize(device)
        return None
