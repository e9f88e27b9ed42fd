"""The machine that served a recording, as the recording's own times tell it: no run is asked for, and none is fitted to.

A request that nobody was beside, from its arrival to its first token, tells a prefill: seconds by what was found and what was
computed. What it took beyond that is its load from the CPU tier. What a reply took beyond others' prefills tells decodes.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from pensieve.errors import ConfigError
from pensieve.lab.traffic.table import Exchange
from pensieve.sim.machine_profile import Grid, MachineProfile
from pensieve.sim.profile import Profile, fit
from pensieve.specs import ModelSpec

FEWEST = 12
"""Requests alone from which a machine is told."""
FREE_S = 1e-9
"""Of a token that is copied, where the recording tells no load: nothing."""
MOST_BESIDE = 64
"""Of the requests that came before one, and after it: so many may have been under way beside it."""
BATCHES = (1, 2, 256)


class Timed(NamedTuple):
    """A request as it was served: seconds of its clock, tokens. loaded: of those found, from the CPU tier."""

    arrival_s: float
    first_s: float
    end_s: float
    prompt: int
    found: int
    loaded: int
    reply: int


def timed(rows: Iterable[Exchange], loaded: Iterable[int]) -> list[Timed]:
    """Those of the rows, in order of arrival, that say all of it. loaded: of each, where the row does not say."""
    return [
        Timed(
            one.arrival_s, one.first_token_s, one.end_s, one.prompt_tokens, one.cached_tokens,
            loads if one.cached_cpu_tokens is None else one.cached_cpu_tokens, one.output_tokens or 1,
        )
        for one, loads in zip(rows, loaded, strict=True)
        if one.arrival_s is not None and one.first_token_s is not None and one.end_s is not None
        and one.prompt_tokens and one.cached_tokens is not None
    ]  # fmt: skip


def machine_of(served: Sequence[Timed], model: ModelSpec, chunk_tokens: int) -> MachineProfile:
    """Raises ConfigError where too few requests were alone."""
    near = [served[max(0, place - MOST_BESIDE) : place + MOST_BESIDE + 1] for place in range(len(served))]
    alone = [one for one, others in zip(served, near, strict=True) if not any(_beside(one, other) for other in others)]
    told = [one for one in alone if not one.loaded]
    if len(told) < FEWEST:
        raise ConfigError(
            f"{len(told)} requests of the recording say when they came, had their first token and ended, and what was found, "
            f"and were alone with nothing to load; {FEWEST} tell a machine. Set machine=given, or record fewer at a time."
        )
    terms = fit([(one.found, one.prompt, one.first_s - one.arrival_s) for one in told])
    loads = [(one.loaded, one.first_s - one.arrival_s - terms.iteration_s(one.found, one.prompt)) for one in alone]
    tokens = sum(count for count, _ in loads)
    load_s = max(0.0, sum(beyond for count, beyond in loads if count) / tokens) if tokens else 0.0
    single_s, further_s = _decodes(served, near, terms.iteration_s)
    lengths = [2**power for power in range(1, model.max_context.bit_length())]
    starts = [0, *lengths]
    where = {"model": model.name, "dtype": model.dtype, "device": "as recorded"}
    block_s = chunk_tokens * max(load_s, FREE_S)
    return MachineProfile(
        costs=Profile(chunk_tokens, {length: terms.iteration_s(0, length) for length in lengths}, block_s, where),
        prefill=Grid(
            rows=tuple(lengths),
            columns=tuple(starts),
            seconds=tuple(tuple(terms.iteration_s(start, start + length) for start in starts) for length in lengths),
        ),
        decode=Grid(
            rows=BATCHES, columns=(0,), seconds=tuple((single_s + (batch - 1) * further_s,) for batch in BATCHES)
        ),
        reply=Grid(rows=(1,), columns=(0,), seconds=((0.0,),)),
        block_bytes=chunk_tokens * model.kv_bytes_per_token,
        h2d_block_s=block_s,
        d2h_block_s=block_s,
        overhead_s=0.0,
        overlaps=True,
        where=where,
        measured={"requests": len(served), "alone": len(told), "loads": sum(count > 0 for count, _ in loads)},
    )


def _beside(one: Timed, other: Timed) -> bool:
    """Whether the other was under way before the one's first token."""
    return other is not one and other.arrival_s < one.first_s and other.end_s > one.arrival_s


def _decodes(
    served: Sequence[Timed], near: Sequence[Sequence[Timed]], prefill_s: Callable[[int, int], float]
) -> tuple[float, float]:
    """Seconds of a decode alone, and of each further request in its batch: least squares over all replies, of what they took
    beyond the prefills of others meanwhile."""
    rows, seconds = [], []
    for one, around in zip(served, near, strict=True):
        others = [other for other in around if other is not one and _overlap_s(one, other) > 0]
        prefills = sum(
            prefill_s(other.found, other.prompt) for other in others if one.first_s < other.first_s < one.end_s
        )
        beside = sum(
            (other.reply - 1) * _overlap_s(one, other) / max(other.end_s - other.first_s, 1e-9) for other in others
        )
        if one.reply > 1:
            rows.append((one.reply - 1, min(beside, (one.reply - 1) * len(others))))
            seconds.append(one.end_s - one.first_s - prefills)
    found, *_ = np.linalg.lstsq(np.array(rows, dtype=float), np.array(seconds), rcond=None)
    single_s = max(float(found[0]), 1e-6)
    return single_s, max(float(found[1]), 0.0)


def _overlap_s(one: Timed, other: Timed) -> float:
    """How long both decoded."""
    return min(one.end_s, other.end_s) - max(one.first_s, other.first_s)
