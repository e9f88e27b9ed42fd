"""Transfers between the tiers beside a plain copy of the same bytes, and what a restore costs beside its limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

from pensieve.bench.case import Case, Figure, Measured
from pensieve.bench.fragments import measure_fragments, scattered, ways_of_copying
from pensieve.bench.models import load
from pensieve.bench.record import now
from pensieve.bench.returning import CHUNK, Returning
from pensieve.bench.session import Bench
from pensieve.bench.unused_tier import UnusedTier
from pensieve.cache.restore import RestoreMode
from pensieve.clock import WallClock
from pensieve.errors import WorkerError
from pensieve.plan import Copy, Row, Sample, StepPlan
from pensieve.worker.torch.link import CudaLink
from pensieve.worker.torch.model import LoadedModel
from pensieve.worker.torch.thread_link import ThreadLink, copy_and_wait
from pensieve.worker.torch.worker import TorchWorker

SLOW_LINK = 12.5e9  # bytes/s of PCIe Gen4 x8, as large copies reach it: what a GPU with a faster link is held to
# On a CPU: loading a token over computing it, by PCIe Gen4 x8 and Gen5 x16 (48 GB/s) to an H200 with an 8B model in bf16.
# The stand-in for the link is as much slower than this machine's compute.
LINKS = {"gen4_x8": 0.35, "gen5_x16": 0.09}
_LEARNED = ("gpt2", "opt")  # positions beyond max_context do not exist; rotary ones do, and speed is what is asked
_GPU, _GPU_FULL, _CPU = (8192,), (8192, 16384, 32768), (1024,)  # tokens that are restored
_MODES: tuple[RestoreMode, ...] = ("load", "hybrid", "recompute")


def run(bench: Bench) -> None:
    """Target swap. Raises PensieveError."""
    model = load(bench)
    measure_fragments(bench, model.spec)
    for tokens in (_GPU_FULL if bench.full else _GPU) if bench.on_gpu else _CPU:
        if tokens + 512 > model.spec.max_context:
            if model.spec.model_type in _LEARNED:
                continue
            model = replace(model, spec=replace(model.spec, max_context=tokens + 512))
        _pipelined(bench, model, tokens)
        if not bench.on_gpu:
            _restored(bench, model, tokens, ThreadLink(), LINKS)
            continue
        if tokens == _GPU[0]:
            _beside_compute(bench, model, tokens)
        _restored(bench, model, tokens, None, {"own_link": None})
        slow = ThreadLink(SLOW_LINK, copy_and_wait, bench.device)
        _restored(bench, model, tokens, slow, {"gen4_x8": None})
    _unused(bench, model)
    if not bench.on_gpu:
        bench.note(
            "A CPU has no link between its tiers: a thread with a bandwidth stands in, as slow beside this machine's "
            "compute as the named link is beside an H200's. swap_in_gb_s is of RAM to RAM."
        )
    else:
        bench.note(f"gen4_x8: copies held back to {SLOW_LINK / 1e9} GB/s by the host. own_link: the machine's.")


def _pipelined(bench: Bench, model: LoadedModel, tokens: int) -> None:
    """Restore `tokens` and compute `new` over them: layer by layer, and one after the other."""
    new, began = 512 if bench.on_gpu else 64, now()
    link = None if bench.on_gpu else ThreadLink()
    worker = TorchWorker(model, CHUNK, WallClock(), link=link)
    chunks = tokens // CHUNK
    worker.start(chunks + new // CHUNK, chunks)
    worker.tensors.cpu.fill_(0.01)
    blocks = tuple(range(chunks))
    row = Row(0, ((tokens, tokens + new),), tuple(i % 250 for i in range(new)), Sample(tokens + new))
    table = ((0, 0, tuple(range(chunks + new // CHUNK))),)
    copies = (Copy(1, blocks, blocks),)

    def step(rows: tuple[Row, ...], swap_in: tuple[Copy, ...]) -> float:
        return perform_ms(worker, StepPlan(1, rows, table, swap_in))

    ways: Mapping[str, Callable[[], float]] = {
        "transfer": lambda: step((), copies),
        "compute": lambda: step((row,), ()),
        "sequential": lambda: step((), copies) + step((row,), ()),
        "pipelined": lambda: step((row,), copies),
    }
    for way in ways.values():
        way()
    if link is not None:  # as long as the compute takes: where overlapping matters most
        link.throttle(chunks * worker.tensors.block_bytes / (min(ways["compute"]() for _ in range(3)) / 1e3))
    values = _rounds(bench.rounds(7), ways)
    worker.close()
    middle = {name: median(v) for name, v in values.items()}
    limit = max(middle["transfer"], middle["compute"])
    hidden = (middle["sequential"] - middle["pipelined"]) / min(middle["transfer"], middle["compute"])
    figures = [
        Figure("speedup", middle["sequential"] / middle["pipelined"], "x", middle["sequential"] / limit),
        Figure("overlap_pct", 100 * hidden, "%", 100.0),
        Figure("transfer_ms", middle["transfer"], "ms"),
        Figure("compute_ms", middle["compute"], "ms"),
    ]
    case = Case(
        label=f"restore {tokens}, compute {new}",
        floor=limit,
        floor_is="the longer of transfer and compute, each alone in the same rounds",
        metric="restore_ms",
        parameters={"context": tokens, "new": new},
        ours="pipelined",
    )
    rows = [Measured("pipelined", values["pipelined"], figures=figures), Measured("sequential", values["sequential"])]
    bench.record(case, rows, began)


def _beside_compute(bench: Bench, model: LoadedModel, tokens: int) -> None:
    """The same with every block apart from all others, by each way of copying: what it takes from the compute beside it
    counts too. Only on a GPU."""
    new, began, chunks = 512, now(), tokens // CHUNK
    link = CudaLink(bench.device)
    worker = TorchWorker(model, CHUNK, WallClock(), link=link)
    worker.start(2 * chunks + new // CHUNK, 2 * chunks)
    copying = ways_of_copying(bench, worker.tensors)
    worker.tensors.cpu.fill_(0.01)
    apart = scattered(chunks, 1)
    copies = (Copy(1, apart, apart[1:] + apart[:1]),)
    row = Row(0, ((tokens, tokens + new),), tuple(i % 250 for i in range(new)), Sample(tokens + new))
    table = ((0, 0, (*copies[0].dst, *range(2 * chunks, 2 * chunks + new // CHUNK))),)

    def step(way: str, rows: tuple[Row, ...], swap_in: tuple[Copy, ...]) -> float:
        link.inward.copier = copying[way].inward
        return perform_ms(worker, StepPlan(1, rows, table, swap_in))

    ways: dict[str, Callable[[], float]] = {way: partial(step, way, (row,), copies) for way in copying}
    ways["transfer"], ways["compute"] = partial(step, "auto", (), copies), partial(step, "auto", (row,), ())
    for measure in ways.values():
        measure()
    values = _rounds(bench.rounds(7), ways)
    fragment = worker.tensors.layer_block_bytes
    worker.close()
    case = Case(
        label=f"restore {tokens} scattered, compute {new}",
        floor=max(median(values["transfer"]), median(values["compute"])),
        floor_is="the longer of transfer and compute, each alone in the same rounds",
        metric="restore_ms",
        parameters={"context": tokens, "new": new, "fragment_bytes": fragment},
        ours="auto",
    )
    bench.record(case, [Measured(way, values[way]) for way in copying], began)


def perform_ms(worker: TorchWorker, plan: StepPlan) -> float:
    """Milliseconds until a plan and all its copies are done. Raises WorkerError."""
    began = perf_counter()
    worker.launch(plan)
    waits_for, computed = {copy.ticket for copy in (*plan.swap_in, *plan.swap_out)}, False
    while waits_for or not computed:
        result = worker.collect(None)
        assert result is not None
        if result.error is not None or result.failed:
            raise WorkerError(result.error or "A copy between the tiers failed.")
        waits_for -= set(result.done)
        computed = computed or result.step is not None
    return (perf_counter() - began) * 1e3


def _rounds(count: int, ways: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Milliseconds of each way, one value a round, each round beginning with another way."""
    values: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(count):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            values[name].append(ways[name]())
    return values


def _restored(
    bench: Bench, model: LoadedModel, tokens: int, link: ThreadLink | None, links: Mapping[str, float | None]
) -> None:
    """Time to first token of a conversation that is on CPU, by how it is restored; links: to what `link` is throttled."""
    new, batch_tokens = (64, 512) if bench.on_gpu else (32, 128)
    returning = Returning(model, tokens, new, batch_tokens, link)
    profile = returning.weigh()
    returning.fill()
    for name, ratio in links.items():
        began = now()
        if link is not None and ratio is not None:
            computed_s = profile.recompute_s(tokens // 2) / CHUNK
            link.throttle(model.spec.kv_bytes_per_token / (ratio * computed_s))
            profile = returning.weigh()
        ways: dict[str, Callable[[], float]] = {mode: _return_of(returning, mode) for mode in _MODES}
        ways["on_gpu"] = returning.hit_ms
        for way in ways.values():
            way()
        values = _rounds(bench.rounds(5), ways)
        _record_hit(bench, returning, profile.load_s(), values, name, began)
        _record_hybrid(bench, returning, values, name, began)
    returning.close()


def _return_of(returning: Returning, mode: RestoreMode) -> Callable[[], float]:
    return lambda: returning.ttft_ms(mode)


def _record_hit(
    bench: Bench, returning: Returning, load_s: float, values: Mapping[str, Sequence[float]], link: str, began: Any
) -> None:
    transfer_ms = returning.tokens / CHUNK * load_s * 1e3
    case = Case(
        label=f"hit on CPU of {returning.tokens}, {link}",
        floor=max(transfer_ms, median(values["on_gpu"])),
        floor_is="the longer of the transfer, by the measured rate, and the same turn with all KV on the GPU",
        metric="ttft_ms",
        parameters={"context": returning.tokens, "new": returning.new, "link": link},
        ours="load",
    )
    bench.record(case, [Measured(mode, values[mode]) for mode in ("load", "recompute")], began)


def _record_hybrid(
    bench: Bench, returning: Returning, values: Mapping[str, Sequence[float]], link: str, began: Any
) -> None:
    split = returning.split()
    better = min(("load", "recompute"), key=lambda mode: median(values[mode]))
    saved = 100 * (1 - median(values["hybrid"]) / median(values[better]))
    predicted = 100 * (1 - split.predicted_s / min(split.load_s, split.recompute_s))
    drift = median(values["recompute"]) / (split.recompute_s * 1e3)
    figures = [
        Figure("saving_pct", saved, "%", predicted),
        Figure("recompute_over_profile", drift, "x", 1.0),
        Figure("predicted_saving_pct", predicted, "%"),
        Figure("recomputed_chunks", float(split.recomputed), "chunks"),
    ]
    case = Case(
        label=f"hybrid restore of {returning.tokens}, {link}",
        floor=split.predicted_s * 1e3,
        floor_is="what the profile predicts for the best split",
        metric="ttft_ms",
        parameters={"context": returning.tokens, "new": returning.new, "link": link},
        ours="hybrid",
    )
    rows = [Measured("hybrid", values["hybrid"], figures=figures)]
    bench.record(case, [*rows, *(Measured(mode, values[mode]) for mode in ("load", "recompute"))], began)
    bench.note(
        f"{case.label}: saves {saved:.1f} % over the better of both ({better}); the profile predicts {predicted:.1f} %, "
        f"with {split.recomputed} of {returning.tokens // CHUNK} chunks computed again. Recomputing all took {drift:.2f} "
        "times as long as by the profile: far from 1, the machine was not the one that was profiled (others ran on it)."
    )


def _unused(bench: Bench, model: LoadedModel) -> None:
    """Decode steps of a batch that fits the GPU tier, with a CPU tier that nothing is copied to, and without one."""
    began, requests, context = now(), *((32, 1024) if bench.on_gpu else (8, 256))
    tiers = {
        "tier_unused": UnusedTier(model, requests, context, with_tier=True),
        "no_tier": UnusedTier(model, requests, context, with_tier=False),
    }
    values = _rounds(bench.rounds(9), {name: tier.step_ms for name, tier in tiers.items()})
    for tier in tiers.values():
        tier.close()
    slower = 100 * (median(values["tier_unused"]) / median(values["no_tier"]) - 1)
    case = Case(
        label=f"decode {requests} over {context}, CPU tier unused",
        floor=min(values["no_tier"]),
        floor_is="the fastest round without the tier",
        metric="step_ms",
        parameters={"batch": requests, "context": context},
        ours="tier_unused",
    )
    figures = [Figure("slower_pct", slower, "%", 1.0)]
    rows = [Measured("tier_unused", values["tier_unused"], figures=figures), Measured("no_tier", values["no_tier"])]
    bench.record(case, rows, began)
