"""Does the model say the same through the paged attention as by itself? Asked once, when it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from pensieve.errors import PensieveError, UnsupportedModel
from pensieve.plan import Row, Sample
from pensieve.specs import ModelSpec
from pensieve.worker.torch.attention import IMPLEMENTATION, REFERENCE, Iteration
from pensieve.worker.torch.batch import BlockTables, build_batch
from pensieve.worker.torch.forward import Forward
from pensieve.worker.torch.kernels.base import AttentionBackend
from pensieve.worker.torch.kv_tensors import KvTensors
from pensieve.worker.torch.rounding import nudged

_PROMPT = 5.5  # chunks: the last one is half full
_CUT = 2.25  # the second piece starts inside a chunk
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}  # of the largest logit, at least of 1


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """difference: the largest, over the logits of every piece; limit: what was allowed."""

    difference: float
    limit: float


def check_against_eager(
    module: Any,
    forward: Forward,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    backend: AttentionBackend = REFERENCE,
    chunk: int = 4,
) -> SelfCheck:
    """Compare the logits of `forward` with those of the module's own eager attention: a prompt whole, in two pieces, and
    a token decoded after it.

    In 16 bits rounding alone moves the logits of a deep model far, and of one with random weights by whole units: there as
    much more is allowed as the module's own logits move when each layer's output is off by an epsilon of the type.

    The blocks are scattered and their unwritten slots hold large numbers. The attention of every layer must be called
    exactly once a forward. Raises UnsupportedModel with the difference, or with what the model did instead.
    """
    length = min(int(_PROMPT * chunk), spec.max_context)
    cut = min(int(_CUT * chunk), length // 2)
    assert 0 < cut < length - 1, "a context too short to check"
    ids = torch.arange(length, device=device).mul(7).add(3).remainder(spec.vocab)
    try:
        with torch.inference_mode():
            module.set_attn_implementation("eager")
            expected = module(input_ids=ids[None], use_cache=False).logits[0].float()
            rounding = 0.0
            if dtype != torch.float32:
                with nudged(module, spec.layers):
                    moved = module(input_ids=ids[None], use_cache=False).logits[0].float()
                rounding = float((moved - expected).abs().max())
            module.set_attn_implementation(IMPLEMENTATION)
            tensors = KvTensors(spec, chunk, 16, 0, device, dtype)
            whole = _pieces(forward, backend, tensors, ids, (0, length))
            in_pieces = _pieces(forward, backend, tensors, ids, (0, cut, length - 1, length))
    except (PensieveError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever the model's code trips over, the user can only choose another model
        raise UnsupportedModel(
            f"Model {spec.name} ({spec.model_type}) does not run through the paged attention "
            f"({type(error).__name__}: {error}); choose a model of another architecture."
        ) from error
    difference = max(float((got - expected).abs().max()) for got in (whole, in_pieces))
    limit = _TOLERANCE[dtype] * max(1.0, float(expected.abs().max())) + rounding
    if not difference <= limit:  # NaN fails too
        raise UnsupportedModel(
            f"Model {spec.name} ({spec.model_type}) fails its self-check: its logits through the paged attention differ "
            f"from its own by {difference:.3g} (at most {limit:.3g} allowed); choose a model of another architecture."
        )
    return SelfCheck(difference, limit)


def _pieces(
    forward: Forward, backend: AttentionBackend, tensors: KvTensors, ids: torch.Tensor, bounds: tuple[int, ...]
) -> torch.Tensor:
    """Logits [tokens, vocab] of the prompt computed in the pieces between `bounds`."""
    tensors.gpu.fill_(1e4)
    tables = BlockTables()
    tables.overwrite(0, 0, (11, 3, 14, 0, 9, 6))
    logits = []
    for start, stop in pairwise(bounds):
        row = Row(0, ((start, stop),), tuple(ids[start:stop].tolist()), Sample(stop))
        batch = build_batch([row], tables, {}, tensors.chunk_tokens, tensors.device)
        iteration = Iteration(batch, tensors.gpu_tokens(), tensors.chunk_tokens, backend=backend)
        piece = forward(iteration, torch.arange(stop - start, device=tensors.device))
        if sorted(iteration.layers) != list(range(tensors.layers)):
            raise UnsupportedModel(
                f"The model has {tensors.layers} layers, but the paged attention was called {len(iteration.layers)} times "
                "a forward, so some layers attend by other means; choose a model of another architecture."
            )
        logits.append(piece.float())
    return torch.cat(logits)
