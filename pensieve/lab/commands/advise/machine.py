"""The machine that served a recording, as the recording's own times tell it: no run is asked for, and none is fitted to.

A request that nobody was beside, from its arrival to its first token, tells a prefill: seconds by what was found and what was
computed. What it took beyond that is its load from the CPU tier. What a reply took beyond others' prefills tells decodes.
"""

from collections.abc import Sequence

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


def machine_of(rows: Sequence[Exchange], loaded: Sequence[int], model: ModelSpec, chunk_tokens: int) -> MachineProfile:
    """rows: in order of arrival; those that lack a time or a length do not count. loaded: of each, the tokens found that came
    from the CPU tier, where the row does not say. Raises ConfigError where too few requests were alone."""
    known = [
        (one.arrival_s, one.first_token_s, one.end_s, one.prompt_tokens or None, one.cached_tokens,
         loads if one.cached_cpu_tokens is None else one.cached_cpu_tokens, one.output_tokens or 1)
        for one, loads in zip(rows, loaded, strict=True)
    ]  # fmt: skip
    served = np.array(known, dtype=float).reshape(-1, 7)
    arrival_s, first_s, end_s, prompt, found, loads, reply = served[~np.isnan(served).any(axis=1)].T
    count = len(reply)
    near = [np.delete(np.arange(max(0, i - MOST_BESIDE), min(count, i + MOST_BESIDE + 1)), min(i, MOST_BESIDE))
            for i in range(count)]  # fmt: skip
    alone = [
        i for i, others in enumerate(near)
        if not ((arrival_s[others] < first_s[i]) & (end_s[others] > arrival_s[i])).any()
    ]  # fmt: skip
    told, ttft_s = [i for i in alone if not loads[i]], first_s - arrival_s
    if len(told) < FEWEST:
        raise ConfigError(
            f"{len(told)} requests of the recording say when they came, had their first token and ended, and what was found, "
            f"and were alone with nothing to load; {FEWEST} tell a machine. Set machine=given, or record fewer at a time."
        )
    terms = fit([(int(found[i]), int(prompt[i]), float(ttft_s[i])) for i in told])
    prefill_s = np.array([terms.iteration_s(int(start), int(stop)) for start, stop in zip(found, prompt, strict=True)])
    beyond_s, tokens = (ttft_s - prefill_s)[alone][loads[alone] > 0].sum(), loads[alone].sum()
    load_s = max(0.0, float(beyond_s / tokens)) if tokens else 0.0
    # A decode alone, and each further request in its batch: least squares over all replies, of what they took beyond the
    # prefills of others meanwhile.
    steps, seconds = [], []
    for i, around in enumerate(near):
        both_s = np.minimum(end_s[i], end_s[around]) - np.maximum(first_s[i], first_s[around])
        others, both_s = around[both_s > 0], both_s[both_s > 0]
        decoded = (reply[others] - 1) * both_s / np.maximum(end_s[others] - first_s[others], 1e-9)
        if reply[i] > 1:
            steps.append((reply[i] - 1, min(decoded.sum(), (reply[i] - 1) * len(others))))
            prefills = others[(first_s[i] < first_s[others]) & (first_s[others] < end_s[i])]
            seconds.append(end_s[i] - first_s[i] - prefill_s[prefills].sum())
    (single_s, further_s), *_ = np.linalg.lstsq(np.array(steps), np.array(seconds), rcond=None)
    single_s, further_s = max(float(single_s), 1e-6), max(float(further_s), 0.0)
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
        measured={"requests": count, "alone": len(told), "loads": int((loads[alone] > 0).sum())},
    )
