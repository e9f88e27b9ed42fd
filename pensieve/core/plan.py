"""What the scheduler decides and a worker performs: frozen, names and integers only, picklable.

A worker keeps, per slot, the block table of the request that runs there and the token it sampled last. Plans execute in
the order they were launched. Inside a plan, blocks that move to a tier below the CPU's are read as they are before anything
of the plan is done; then come the moves to the GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pensieve.core.request import Sampling

Tier = str
"""Name of a tier: GPU, CPU, or what a tier below calls itself."""

GPU, CPU = "gpu", "cpu"


@dataclass(frozen=True, slots=True)
class Move:
    """Whole blocks, all layers, from src[i] of one tier to dst[i] of another; over when its ticket is reported.

    keys: what the blocks are called in a tier below the CPU's; a load from there brings what these name, or has failed.
    urgent: a request waits for it.
    """

    ticket: int
    source: Tier
    target: Tier
    src: tuple[int, ...]
    dst: tuple[int, ...]
    keys: tuple[bytes, ...] = ()
    urgent: bool = False


class Moved(NamedTuple):
    """A move is over. ok: False where what it wrote is not valid. gone: of its keys, those that the tier below lacks."""

    ticket: int
    ok: bool = True
    gone: tuple[bytes, ...] = ()


class Sample(NamedTuple):
    """How to draw the token at `position`; `key`: of the noise, the same for a whole turn. temperature 0 is greedy."""

    position: int
    key: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0


class Row(NamedTuple):
    """The positions of one request that are computed in this iteration; a tuple, since a plan has one for each.

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


class Decodes(NamedTuple):
    """Requests that decode without rows of their own: of each one more position is computed, and a token sampled. before: the
    positions before these, of all requests together; longest: of the one that has the most."""

    requests: int = 0
    before: int = 0
    longest: int = 0


NO_DECODES = Decodes()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One iteration. rows may be empty: copies and decodes only. decodes: only for a worker that computes nothing.

    tables: (slot, first chunk, block ids): what changed in the slots' block tables since the last plan. moves: in the order
    in which they were decided; those with a tier below are performed in this order.
    repeat: iterations that this plan may stand for, each further one as the one before (only for a worker that computes
    nothing): a row that is sampled goes on by one position, another one by as many as it has. None begins at horizon_ns or
    later, while a move to the GPU is under way, or after a move has ended.
    """

    step: int
    rows: tuple[Row, ...] = ()
    tables: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    moves: tuple[Move, ...] = ()
    repeat: int = 1
    horizon_ns: int | None = None
    decodes: Decodes = NO_DECODES


@dataclass(frozen=True, slots=True)
class Repeats:
    """The further iterations of a plan that was repeated: when each ended, and how long it took."""

    ended_ns: NDArray[np.int64]
    compute_ns: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a plan did. tokens and margins by slot (margin: top logit less the second; absent where unknown).
    not_finite: slots that were to be sampled and whose logits are NaN or infinite; the other rows are valid.

    moved: moves that ended since the last result, of this plan or of earlier ones. With an error, nothing that this plan
    wrote is valid, and no result says that one of its moves to the GPU or the CPU tier is over, neither this one nor a later
    one. repeats: what came after the first iteration, which all else here is about.
    ended_ns: the clock at the end of the iteration; None where the plan computed nothing. step None: only copies finished.
    stall_ns: compute that waited for a transfer. error: the sentence that fails this plan's requests.
    """

    step: int | None
    tokens: dict[int, int] = field(default_factory=dict)
    margins: dict[int, float] = field(default_factory=dict)
    not_finite: tuple[int, ...] = ()
    ended_ns: int | None = None
    moved: tuple[Moved, ...] = ()
    compute_ns: int = 0
    stall_ns: int = 0
    h2d_bytes: int = 0
    d2h_bytes: int = 0
    error: str | None = None
    repeats: Repeats | None = None


@dataclass(frozen=True, slots=True)
class StartReport:
    """load_s: weights to memory; None where an earlier trial of the process has loaded them. warmup_ms: from then until
    ready. settings: as the engine itself reports them.

    below_load_s: seconds to read a chunk from the tier below the CPU's, where there is one; below_kept: block by key of what
    that holds from before, oldest first.
    eos: token ids that end a turn by the model's own account, which may name more than its tokenizer does. sampling: how
    the model's generation_config.json draws tokens, for callers that do not say.
    """

    load_s: float | None
    warmup_ms: float
    settings: dict[str, Any] = field(default_factory=dict)
    eos: frozenset[int] = frozenset()
    below_load_s: float = 0.0
    below_kept: Mapping[bytes, int] = field(default_factory=dict)
    sampling: Sampling = field(default_factory=Sampling)
