"""What the scheduler decides and a worker performs: frozen, integers only, picklable.

A worker keeps, per slot, the block table of the request that runs there and the token it sampled last. Plans execute in
the order they were launched; inside a plan what goes to disk is read from its blocks first, then come the swap-ins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pensieve.core.request import Sampling, TokenArray


@dataclass(frozen=True, slots=True)
class Copy:
    """Whole blocks, all layers, from src[i] of one tier to dst[i] of the other; done when its ticket is reported."""

    ticket: int
    src: tuple[int, ...]
    dst: tuple[int, ...]
    urgent: bool = False


@dataclass(frozen=True, slots=True)
class DiskStore:
    """Block src, of the GPU or the CPU tier, to block dst of the file store, as it is before anything of the plan is done.
    key: what it is called there."""

    key: bytes
    on_gpu: bool
    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class DiskLoad:
    """Blocks src[i] of the file store to GPU blocks dst[i], if they hold what these keys name."""

    ticket: int
    keys: tuple[bytes, ...]
    src: tuple[int, ...]
    dst: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """How to draw the token at `position`; `key`: of the noise, the same for a whole turn. temperature 0 is greedy."""

    position: int
    key: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """The positions of one request that are computed in this iteration.

    runs: half-open, ascending, disjoint. Each run [a, b) is one attention row: b - a queries over kv_len b, causal from
        the bottom right. All K and V of the iteration are written before any row attends.
    tokens: one id a position, in the order of runs; None: one position, whose token this slot sampled last.
    sample: set where the last run ends at the last known token, so that the row yields logits.
    """

    slot: int
    runs: tuple[tuple[int, int], ...]
    tokens: tuple[int, ...] | None
    sample: Sample | None = None

    @property
    def positions(self) -> int:
        return sum(stop - start for start, stop in self.runs)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One iteration. rows may be empty: copies only.

    tables: (slot, first chunk, block ids): what changed in the slots' block tables since the last plan. disk: in this order.
    repeat: iterations that this plan may stand for, each further one as the one before (only for a worker that computes
    nothing): a row that is sampled goes on by one position, another one by as many as it has. None begins at horizon_ns or
    later, while a swap-in or a read is under way, or after a copy has ended.
    """

    step: int
    rows: tuple[Row, ...] = ()
    tables: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    swap_in: tuple[Copy, ...] = ()
    swap_out: tuple[Copy, ...] = ()
    disk: tuple[DiskStore | DiskLoad, ...] = ()
    repeat: int = 1
    horizon_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Repeats:
    """The further iterations of a plan that was repeated: when each ended and how long it took, and its tokens by slot."""

    ended_ns: tuple[int, ...]
    compute_ns: tuple[int, ...]
    tokens: dict[int, TokenArray[int]]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a plan did. tokens and margins by slot (margin: top logit less the second; absent where unknown).
    not_finite: slots that were to be sampled and whose logits are NaN or infinite; the other rows are valid.

    done, failed: tickets of copies that ended since the last result, of this plan or of earlier ones; what a failed copy
    wrote is not valid. unread: tickets of loads from disk that brought something else than was asked for; unkept: keys that
    the file store does not hold. With an error, nothing that this plan wrote is valid, and its tickets are in no result,
    neither in this one nor in a later one. repeats: what came after the first iteration, which all else here is about.
    ended_ns: the clock at the end of the iteration; None where the plan computed nothing. step None: only copies finished.
    stall_ns: compute that waited for a transfer. error: the sentence that fails this plan's requests. plan_bytes, plan_ns: of
    a plan that went to several processes: its size on the way, and the time from the launch until the last of them had it.
    """

    step: int | None
    tokens: dict[int, int] = field(default_factory=dict)
    margins: dict[int, float] = field(default_factory=dict)
    not_finite: tuple[int, ...] = ()
    ended_ns: int | None = None
    done: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    unread: tuple[int, ...] = ()
    unkept: tuple[bytes, ...] = ()
    compute_ns: int = 0
    stall_ns: int = 0
    h2d_bytes: int = 0
    d2h_bytes: int = 0
    error: str | None = None
    plan_bytes: int = 0
    plan_ns: int = 0
    repeats: Repeats | None = None


@dataclass(frozen=True, slots=True)
class StartReport:
    """load_s: weights to memory; None where an earlier trial of the process has loaded them. warmup_ms: from then until
    ready. settings: as the engine itself reports them.

    disk_load_s: seconds to read a chunk from the file store, measured where there is one; disk_kept: block by key of what it
    holds from before, oldest first.
    eos: token ids that end a turn by the model's own account, which may name more than its tokenizer does. sampling: how
    the model's generation_config.json draws tokens, for callers that do not say.
    """

    load_s: float | None
    warmup_ms: float
    settings: dict[str, Any] = field(default_factory=dict)
    eos: frozenset[int] = frozenset()
    disk_load_s: float = 0.0
    disk_kept: Mapping[bytes, int] = field(default_factory=dict)
    sampling: Sampling = field(default_factory=Sampling)
