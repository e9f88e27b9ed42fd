"""A started worker that is driven through plans, as the engine drives it, but with nothing to decide."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from pensieve.clock import WallClock
from pensieve.errors import WorkerError
from pensieve.plan import Row, Sample, StepPlan
from pensieve.units import ceil_div
from pensieve.worker.torch.model import LoadedModel
from pensieve.worker.torch.options import TorchOptions
from pensieve.worker.torch.worker import TorchWorker

CHUNK = 32
_PREFILL_TOKENS = 8192  # of one plan
_GRAPH_ROWS = 64  # recorded at least


def prompt(slot: int, tokens: int, vocab: int) -> tuple[int, ...]:
    """Another for each of the first `vocab` slots."""
    return tuple((slot + 7 * i) % vocab for i in range(tokens))


class Stepper:
    """`requests` conversations of `context` tokens whose KV is on the device; slot i holds conversation i.

    Every decode step computes the same position again, so that all of them do the same work. tokens: what each slot
    sampled last.
    """

    def __init__(self, model: LoadedModel, requests: int, context: int) -> None:
        # On a GPU one step ahead, and with graphs for every batch that is asked for.
        depth = 2 if model.device.type == "cuda" else 1
        options = TorchOptions(depth=depth, max_batch_requests=max(_GRAPH_ROWS, requests))
        self.worker = TorchWorker(model, CHUNK, WallClock(), options=options)
        self.requests, self.context = requests, context
        chunks = ceil_div(context + 1, CHUNK)
        self.worker.start(requests * chunks, 0)
        self._tables = tuple((s, 0, tuple(range(s * chunks, (s + 1) * chunks))) for s in range(requests))
        self._step = 0
        self.tokens: dict[int, int] = {}
        self._perform([self._plan((), self._tables)])

    def fill(self) -> None:
        """Prefill all conversations, several a plan."""
        a_plan = max(1, _PREFILL_TOKENS // self.context)
        slots = range(self.requests)
        plans = [slots[i : i + a_plan] for i in range(0, self.requests, a_plan)]
        self._perform([self._plan([self._prompt(slot, self.context) for slot in some]) for some in plans])

    def decode(self, batch: int, steps: int) -> float:
        """Milliseconds a step of the first `batch` conversations, over `steps` of them kept as deep as the worker may."""
        at = self.context
        rows = [Row(slot, ((at, at + 1),), None, Sample(at + 1)) for slot in range(batch)]
        plans = [self._plan(rows) for _ in range(steps)]
        return self._perform(plans) / steps

    def prefill(self, tokens: int) -> float:
        """Milliseconds to compute the first `tokens` positions of the first conversation, with the token after them."""
        return self._perform([self._plan([self._prompt(0, tokens)])])

    def close(self) -> None:
        self.worker.close()

    def _prompt(self, slot: int, tokens: int) -> Row:
        return Row(slot, ((0, tokens),), prompt(slot, tokens, self.worker.model.spec.vocab), Sample(tokens))

    def _plan(self, rows: Sequence[Row], tables: tuple[tuple[int, int, tuple[int, ...]], ...] = ()) -> StepPlan:
        self._step += 1
        return StepPlan(step=self._step, rows=tuple(rows), tables=tables)

    def _perform(self, plans: Sequence[StepPlan]) -> float:
        """Milliseconds from the first launch until the last result is here."""
        began, in_flight = perf_counter(), 0
        for plan in plans:
            if in_flight == self.worker.depth:
                self._collect()
                in_flight -= 1
            self.worker.launch(plan)
            in_flight += 1
        for _ in range(in_flight):
            self._collect()
        return (perf_counter() - began) * 1e3

    def _collect(self) -> None:
        result = self.worker.collect(None)
        assert result is not None
        if result.error is not None:
            raise WorkerError(result.error)
        self.tokens.update(result.tokens)
