"""Compares the logits of a model through the paged attention with its own, once, when it is loaded."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from pensieve.core.plan import Row, Sample
from pensieve.device.attention import IMPLEMENTATION, REFERENCE, Forward, Iteration
from pensieve.device.batch import BlockTables, build_batch
from pensieve.device.kernels.base import AttentionBackend
from pensieve.device.kv_tensors import KvTensors
from pensieve.errors import PensieveError, UnsupportedModel
from pensieve.specs import ModelSpec

_PROMPT = 5.5  # chunks: the last one is half full
_CUT = 2.25  # the second piece starts inside a chunk
_BLOCKS = (11, 3, 14, 0, 9, 6)
_FLOAT32 = 1e-4  # of the largest logit, at least of 1
_PROMPTS = 4  # in 16 bits, where an error is a sample of what rounding does
# Right paths came to 0.78 to 1.03 (11 models, both 16-bit types, three instruction sets); attention scaled by 10 % too much
# to 4.3 and more, its output by 5 % to 2.07.
MULTIPLE = 1.5


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """difference: between the logits of `forward` and the right ones, and the most that was allowed.

    against: what the right ones are. "eager" in float32: the module's own logits, and the difference is the largest one.
    "float32" in 16 bits: those of the same weights in float32, and the difference is the root mean square of the worst way
    to cut the prompts, at most MULTIPLE of what the module's own 16-bit logits differ by.
    """

    difference: float
    limit: float
    against: str


def check_against_eager(
    module: Any,
    forward: Forward,
    spec: ModelSpec,
    device: torch.device,
    backend: AttentionBackend = REFERENCE,
    chunk: int = 4,
) -> SelfCheck:
    """Compare the logits of `forward` with the right ones: a prompt whole, and in pieces of which the last is one token.

    Two right ways to compute a deep model in 16 bits differ by whole units of its logits, by another amount on each machine;
    but each is as far from float32 as the other. So there the module's own distance is the measure, over several prompts.

    The blocks are scattered, and what was never written in them are large numbers. The attention of every layer must be
    called exactly once a forward. Raises UnsupportedModel with the difference, or with what the model did instead.
    """
    length = min(int(_PROMPT * chunk), spec.max_context)
    cut = min(int(_CUT * chunk), length // 2)
    assert 0 < cut < length - 1, "a context too short to check"
    # The last pieces have 4, 3, 2 and 1 tokens: what is compiled on the user's machine has code of its own for each.
    ends = [length - tokens for tokens in (10, 6, 3, 1) if length - tokens > cut]
    cuts = ((0, length), (0, cut, *ends, length))
    try:
        tensors = KvTensors(spec, chunk, 16, 0, device, getattr(torch, spec.dtype))
        check = _compared(module, partial(_pieces, forward, backend, tensors), spec, device, cuts)
    except (PensieveError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever the model's code trips over, the user can only choose another model
        raise UnsupportedModel(
            f"Model {spec.name} ({spec.model_type}) does not run through the paged attention "
            f"({type(error).__name__}: {error}); choose a model of another architecture."
        ) from error
    if not check.difference <= check.limit:  # NaN fails too
        its = "its own" if check.against == "eager" else "those of the same weights in float32"
        raise UnsupportedModel(
            f"Model {spec.name} ({spec.model_type}) fails its self-check: its logits through the paged attention differ "
            f"from {its} by {check.difference:.3g} (at most {check.limit:.3g} allowed). Choose a model of another "
            "architecture."
        )
    return check


def _compared(
    module: Any,
    paged: Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor],
    spec: ModelSpec,
    device: torch.device,
    cuts: tuple[tuple[int, ...], ...],
) -> SelfCheck:
    """paged: logits [tokens, vocab] of a prompt computed in the pieces between bounds."""
    halves = spec.dtype != "float32"
    own, ours = (
        0.0,
        torch.zeros(len(cuts), dtype=torch.float64),
    )  # sums of mean squares; in float32 the largest differences
    for number in range(_PROMPTS if halves else 1):  # one at a time: logits over a large vocabulary take much memory
        ids = torch.arange(cuts[0][-1], device=device).mul(7 + 4 * number).add(3 + number).remainder(spec.vocab)
        with _eager(module):
            with torch.no_grad(), upcast(module, spec.layers) if halves else nullcontext():
                exact = module(input_ids=ids[None], use_cache=False).logits[0]
            if halves:
                with torch.inference_mode():
                    own += float(_squares(module(input_ids=ids[None], use_cache=False).logits[0], exact).mean())
        with torch.inference_mode():
            for index, bounds in enumerate(cuts):
                squares = _squares(paged(ids, bounds), exact)
                ours[index] += float(squares.mean() if halves else squares.max())
    worst = float(ours.max())  # NaN, if one of them is
    if not halves:
        return SelfCheck(worst**0.5, _FLOAT32 * max(1.0, float(exact.abs().max())), "eager")
    return SelfCheck((worst / _PROMPTS) ** 0.5, MULTIPLE * (own / _PROMPTS) ** 0.5, "float32")


def _squares(got: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    assert exact.dtype == torch.float32
    return (got.float() - exact).square()


@contextmanager
def _eager(module: Any) -> Iterator[None]:
    """Let the module attend by its own eager code inside the block."""
    module.set_attn_implementation("eager")
    try:
        yield
    finally:
        module.set_attn_implementation(IMPLEMENTATION)


def _pieces(
    forward: Forward, backend: AttentionBackend, tensors: KvTensors, ids: torch.Tensor, bounds: tuple[int, ...]
) -> torch.Tensor:
    """Logits [tokens, vocab] of the prompt computed in the pieces between `bounds`."""
    tensors.gpu.fill_(1e4)
    tables = BlockTables()
    tables.overwrite(0, 0, _BLOCKS)
    logits = []
    for start, stop in pairwise(bounds):
        row = Row(0, ((start, stop),), tuple(ids[start:stop].tolist()), Sample(stop))
        batch = build_batch([row], tables, tensors.chunk_tokens, tensors.device)
        iteration = Iteration(batch, tensors.gpu_tokens(), tensors.chunk_tokens, backend=backend)
        piece = forward(iteration, torch.arange(stop - start, device=tensors.device))
        if sorted(iteration.layers) != list(range(tensors.layers)):
            raise UnsupportedModel(
                f"The model has {tensors.layers} layers, but the paged attention was called {len(iteration.layers)} times "
                "a forward: some layers attend by other means. Choose a model of another architecture."
            )
        logits.append(piece.float())
    return torch.cat(logits)


# -- a 16-bit model in float32 -----------------------------------------------------------------------------------------------

_HALVES = (torch.float16, torch.bfloat16)


@contextmanager
def upcast(module: Any, layers: int) -> Iterator[None]:
    """Inside, the module's forwards compute in float32.

    Each part's weights are float32 only while it computes: a decoder layer, or what lies outside of the layers (embedding,
    last norm, head). So beside the weights there is room needed for the largest of these alone, in float32, and not for a
    second model. Not inside torch.inference_mode, in which parameters cannot be exchanged.
    """
    raised: dict[int, list[_Weight]] = {}  # by the id of the part

    def raise_(part: Any, _: Any) -> None:
        """Tensors are exchanged, not their data: one that is divided among processes (a DTensor) would keep its own."""
        raised[id(part)] = found = list(_weights(part.modules()))
        for own, name, tensor in found:
            whole, learned = tensor.detach().float(), isinstance(tensor, torch.nn.Parameter)
            own[name] = torch.nn.Parameter(whole, requires_grad=False) if learned else whole

    def lower(part: Any, *_: Any) -> None:
        for own, name, tensor in raised.pop(id(part), []):
            own[name] = tensor

    hooks = []
    for part in _parts(module, layers):
        hooks += [part.register_forward_pre_hook(raise_), part.register_forward_hook(lower, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# A module's own parameters or buffers, a name, what is there.
_Weight = tuple[dict[str, torch.Tensor | None], str, torch.Tensor]


def _parts(module: Any, layers: int) -> Iterator[Any]:
    """The decoder's layers, and the other modules that own weights."""
    found = [x for x in module.modules() if isinstance(x, torch.nn.ModuleList) and len(x) == layers]
    decoder = list(found[0]) if found else []
    inside = {part for layer in decoder for part in layer.modules()}
    yield from decoder
    yield from (part for part in module.modules() if part not in inside and any(_weights([part])))


def _weights(modules: Iterable[Any]) -> Iterator[_Weight]:
    """Those in 16 bits that the modules themselves own."""
    for module in modules:
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None and tensor.dtype in _HALVES:
                    yield own, name, tensor
