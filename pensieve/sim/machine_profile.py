"""A machine as runners/profile.py measured it: whole iterations and copies, for the retention value and the simulator alike.

An iteration of one prefill [s, s + q) was measured over a grid of q and s, one of b decodes at context c over a grid of b and
c. A mixed iteration takes what its parts take alone, less what each of them but one pays again for being an iteration: the
least that any decode takes. Between sizes that were measured times are interpolated linearly in both; beyond them in
proportion to the work.
"""

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from pensieve.core.plan import NO_DECODES, Decodes
from pensieve.errors import ConfigError
from pensieve.sim.profile import Profile
from pensieve.sim.roofline import Run
from pensieve.specs import HardwareSpec, ModelSpec

COMMAND = "python runners/profile.py"


class Grid(BaseModel):
    """seconds[i][j] of rows[i] and columns[j], both ascending. Rows may differ in length: what does not fit the pools was
    not measured, and is a row's end."""

    model_config = ConfigDict(frozen=True)

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def at(self, row: float, column: float) -> float:
        """Linear in both between neighbours. Beyond the last column a row goes on at its last slope; beyond the rows the time
        grows in proportion to the row."""
        if row <= self.rows[0]:
            return self._along(0, column)
        if row >= self.rows[-1]:
            return self._along(-1, column) * row / self.rows[-1]
        upper = bisect_right(self.rows, row)
        low, high = self._along(upper - 1, column), self._along(upper, column)
        share = (row - self.rows[upper - 1]) / (self.rows[upper] - self.rows[upper - 1])
        return low + share * (high - low)

    def covers(self, row: float, column: float) -> bool:
        if row > self.rows[-1]:
            return False
        upper = bisect_left(self.rows, row)
        return column <= self.columns[len(self.seconds[upper]) - 1]

    def _along(self, row: int, column: float) -> float:
        known = self.seconds[row]
        if len(known) == 1 or column <= self.columns[0]:
            return known[0]
        right = min(bisect_right(self.columns, column, hi=len(known)), len(known) - 1)
        left = right - 1
        slope = (known[right] - known[left]) / (self.columns[right] - self.columns[left])
        return max(known[left] + slope * (column - self.columns[left]), min(known))


class MachineProfile(BaseModel):
    """costs: what the retention value goes by. prefill: rows are queries, columns the position that they start at. decode:
    rows are requests, columns their context, long after the last prefill. reply: rows are tokens of a prompt, columns tokens
    of its reply: what each takes beyond its iteration. That is the host's time from the arrival of a prompt at an idle
    engine to the first token, charged once a prompt also at a busy one, and what decodes after a prefill take until a
    processor's caches hold what they read again; measured of one request, and added whatever the batch. h2d_block_s,
    d2h_block_s: one block of `costs.chunk_tokens`, which is block_bytes. overhead_s: host time of an iteration beside the
    worker's. overlaps: copies run beside compute. where: model, dtype, device, threads, versions. measured: when, how long
    it took, and how busy the machine was.
    """

    model_config = ConfigDict(frozen=True)

    costs: Profile
    prefill: Grid
    decode: Grid
    reply: Grid
    block_bytes: int
    h2d_block_s: float
    d2h_block_s: float
    overhead_s: float
    overlaps: bool
    where: dict[str, Any]
    measured: dict[str, Any]

    def prompt_s(self, tokens: float) -> float:
        """The host's time for a prompt of so many tokens."""
        return self._of_reply(tokens, 0)

    def settling_s(self, prefilled: float, decodes: int) -> float:
        """What a decode takes longer than later ones. prefilled: tokens of the last prefill; decodes: how many came since."""
        return self._of_reply(prefilled, 1 + decodes) if decodes + 1 < len(self.reply.columns) else 0.0

    def _of_reply(self, tokens: float, token: int) -> float:
        return self.reply.at(min(tokens, self.reply.rows[-1]), token)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_name(f"{path.name}.{os.getpid()}")  # nobody reads half a file
        whole.write_text(self.model_dump_json(indent=1), encoding="utf-8")
        whole.replace(path)

    def refuse_other(self, model: ModelSpec, chunk_tokens: int) -> None:
        """Raises ConfigError where it was measured for another model, dtype or chunk size."""
        asked = {"model": model.name, "dtype": model.dtype, "chunk_tokens": chunk_tokens}
        measured = {**self.where, "chunk_tokens": self.costs.chunk_tokens}
        for name, value in asked.items():
            if measured.get(name) != value:
                raise ConfigError(
                    f"hardware.profile was measured with {name} {measured.get(name)}, and this trial has {value}; measure "
                    f"one for it: {COMMAND} model={model.name}."
                )


def read_profile(path: str) -> MachineProfile:
    """Raises ConfigError for a file that is not there, or is no profile."""
    file = Path(path).expanduser()
    try:
        return _parsed(file.read_bytes())
    except OSError:
        raise ConfigError(
            f"There is no profile at {file}; measure one with {COMMAND}, or set hardware.profile."
        ) from None
    except ValidationError:
        raise ConfigError(
            f"{file} is no profile of a machine, or one of an earlier version; {COMMAND} writes them."
        ) from None


@lru_cache(maxsize=4)
def _parsed(content: bytes) -> MachineProfile:
    return MachineProfile.model_validate_json(content)


class ProfiledCost:
    """What a simulated worker and the cache ask of time, from a machine's profile."""

    def __init__(self, profile: MachineProfile, model: ModelSpec, hardware: HardwareSpec, chunk_tokens: int) -> None:
        profile.refuse_other(model, chunk_tokens)
        self._profile, self._overhead_s = profile, hardware.step_overhead_s
        self._floor_s = min(min(row) for row in profile.decode.seconds)
        self._iterations = self._beyond = 0
        self._prefilled = self._decodes = 0  # tokens of the last prefill, and decodes since
        costs = profile.costs
        self.recompute_s, self.step_s, self.weights_s, self.load_s = (
            costs.recompute_s, costs.step_s, costs.weights_s, costs.load_s,
        )  # fmt: skip

    def iteration_s(self, runs: Iterable[Run], sampled: int, decodes: Decodes = NO_DECODES) -> float:
        """See SimulatedCost; asked once for each iteration that runs, in order, since the first decodes after a prefill take
        longer. The logits are part of what was measured: every prefill there samples a token."""
        parts: list[float] = []
        alone, context = decodes.requests, decodes.before
        queries: list[int] = []
        host_s = self._overhead_s
        within, profile = True, self._profile
        for start, stop in runs:
            if stop - start == 1:
                alone, context = alone + 1, context + start
            else:
                queries.append(stop - start)
                parts.append(profile.prefill.at(stop - start, start))
                within = within and profile.prefill.covers(stop - start, start)
        if queries:
            prompts = max(0, sampled - alone)  # those whose last part this is
            host_s += prompts * profile.prompt_s(sum(queries) / len(queries))
            self._prefilled, self._decodes = sum(queries), 0
        elif alone and self._prefilled:
            host_s += profile.settling_s(self._prefilled, self._decodes)
            self._decodes += 1
        if alone:
            parts.append(profile.decode.at(alone, context / alone))
            within = within and profile.decode.covers(alone, context / alone)
        if not parts:
            return 0.0
        self._iterations += 1
        self._beyond += not within
        return max(max(parts), sum(parts) - self._floor_s * (len(parts) - 1)) + host_s

    def following_s(self, runs: Sequence[Run], sampled: int, decodes: Decodes, most: int) -> None:
        """None: what an iteration takes depends on those before it."""

    def ran(self, iterations: int) -> None:
        """Do nothing: none is told before it runs."""

    def transfer_s(self, blocks: int, to_gpu: bool, runs: int = 1) -> float:
        """runs: not asked; what pieces cost is in the time of a block that was measured."""
        return blocks * (self._profile.h2d_block_s if to_gpu else self._profile.d2h_block_s)

    def describe(self) -> dict[str, Any]:
        return {
            **self._profile.costs.describe(),
            "kind": "machine profile",
            "where": self._profile.where,
            "measured": self._profile.measured,
        }

    def extrapolated(self) -> dict[str, Any]:
        if not self._beyond:
            return {}
        return {"profile": {"iterations": self._beyond, "of": self._iterations}}
