"""Conversations served on the stand-in, with nothing that waits for the device but the engine itself."""

from functools import cache
from typing import Any, NamedTuple

from pensieve.core.plan import Sample
from pensieve.core.request import Sampling
from pensieve.core.scheduler.active_request import ActiveRequest
from pensieve.core.scheduler.scheduler import SchedulerSettings
from pensieve.device.asked import ModelAsked
from pensieve.device.model import LoadedModel, load_model
from pensieve.device.worker import TorchOptions
from pensieve.plugins.caches.restore import RestoreMode
from pensieve.specs import ModelSpec
from tests.exact import CheckedEngine, Paths
from tests.gpu.conversations import restoring
from tests.soak import Episode, perform
from tests.worker.torch.driver import ARCHITECTURES, CHUNK, drawn, plain_logits

from .standin.machine import Machine

GPU_BLOCKS, CPU_BLOCKS, CONTEXT, REQUESTS = 18, 24, 512, 4
_TOLERANCE = 1e-3  # of a logit: two tokens this close are a tie


@cache
def tiny(name: str = "llama", fused: bool = True, dtype: str = "float32", attention: str = "auto") -> LoadedModel:
    """On the stand-in, which must be in place."""
    spec = ModelSpec.from_architecture(name, ARCHITECTURES[name], dtype)
    return load_model(
        ModelAsked(spec, device="cuda:0", threads=1, fused=fused, attention=attention, chunk_tokens=CHUNK)
    )


@cache
def reference(name: str) -> LoadedModel:
    """The same weights on the CPU."""
    spec = ModelSpec.from_architecture(name, ARCHITECTURES[name])
    return load_model(ModelAsked(spec, threads=1, fused=False, attention="reference"))


class Turn(NamedTuple):
    """tokens: the whole conversation, of which the last `output` were sampled with `key`."""

    tokens: list[int]
    output: int
    sampling: Sampling
    key: int


class Serving(CheckedEngine):
    """Compares nothing while it serves, since that would wait for the device: `wrong_tokens` does it afterwards."""

    compares = False

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.turns: list[Turn] = []

    def _close(
        self, active: ActiveRequest, status: str, reason: str | None, now_s: float, error: str | None = None
    ) -> None:
        super()._close(active, status, reason, now_s, error)
        if status == "completed":
            output, request = active.generated, active.request
            self.turns.append(Turn(list(active.session.tokens), output, request.sampling, active.noise_key))


def converse(
    device: Machine, model: LoadedModel, mode: RestoreMode, options: TorchOptions, turns: int, returns: int
) -> tuple[Serving, Paths, int]:
    """Random conversations, more than both tiers hold. Nothing races, and nothing waits but for the tokens of a plan. The
    last number is of replays."""
    settings = SchedulerSettings(max_batch_tokens=48, max_batch_requests=REQUESTS)
    engine = Serving(model, restoring(model, mode, GPU_BLOCKS, CPU_BLOCKS, 48), settings, CONTEXT, options=options)
    episode, close = Episode(5 if mode == "hybrid" else 4, 0), engine.torch_worker.close
    device.forget()
    before = device.replays

    def check_and_close() -> None:
        """The end of a worker waits for everything, as it should."""
        device.assert_clean()
        close()

    engine.torch_worker.close = check_and_close  # type: ignore[method-assign]
    paths = perform(engine, [*episode.operations(turns), *(episode.returns(returns) if returns else ())])
    return engine, paths, device.replays - before


def wrong_tokens(turns: list[Turn], name: str) -> tuple[int, int]:
    """How many sampled tokens are not the plain model's, and of how many."""
    model, wrong, total = reference(name), 0, 0
    for tokens, output, how, key in turns:
        first = len(tokens) - output
        logits = plain_logits(model, tokens[:-1])[first - 1 :]
        places = range(first, len(tokens))
        expected, _ = drawn(logits, [Sample(at, key, how.temperature, how.top_p, how.top_k) for at in places])
        for row, wanted, token in zip(logits, expected, tokens[first:], strict=True):
            tie = how.temperature == 0 and abs(float(row[wanted] - row[token])) < _TOLERANCE
            wrong += token != wanted and not tie
            total += 1
    return wrong, total


def plain_token(tokens: list[int], name: str = "llama") -> int:
    """What the plain model says next."""
    return int(plain_logits(reference(name), tokens)[-1].argmax())
