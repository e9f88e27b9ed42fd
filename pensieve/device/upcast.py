"""Runs a 16-bit model in float32 with the same weights: the reference that its 16-bit forwards are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_HALVES = (torch.float16, torch.bfloat16)


@contextmanager
def upcast(module: Any, layers: int) -> Iterator[None]:
    """Inside, the module's forwards compute in float32.

    Each part's weights are float32 only while it computes: a decoder layer, or what lies outside of the layers (embedding,
    last norm, head). So beside the weights there is room needed for the largest of these alone, in float32, and not for a
    second model. Not inside torch.inference_mode, in which parameters cannot be exchanged.
    """
    raised: _Raised = {}
    hooks = []
    for part in _parts(module, layers):
        hooks.append(part.register_forward_pre_hook(_raise(raised)))
        hooks.append(part.register_forward_hook(_lower(raised), always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


_Place = tuple[dict[str, torch.Tensor | None], str]  # a module's own parameters or buffers, and a name among them
_Raised = dict[int, list[tuple[_Place, torch.Tensor]]]  # by the id of the part: where its weights belong


def _parts(module: Any, layers: int) -> Iterator[Any]:
    """The decoder's layers, and the other modules that own weights."""
    found = [x for x in module.modules() if isinstance(x, torch.nn.ModuleList) and len(x) == layers]
    decoder = list(found[0]) if found else []
    inside = {part for layer in decoder for part in layer.modules()}
    yield from decoder
    yield from (part for part in module.modules() if part not in inside and list(_weights(part, recurse=False)))


def _weights(part: Any, recurse: bool) -> Iterator[tuple[_Place, torch.Tensor]]:
    for module in part.modules() if recurse else (part,):
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None and tensor.dtype in _HALVES:
                    yield (own, name), tensor


def _raise(raised: _Raised) -> Callable[..., None]:
    """Tensors are exchanged, not their data: one that is divided among processes (a DTensor) would keep its own."""

    def hook(part: Any, _: Any) -> None:
        raised[id(part)] = found = list(_weights(part, recurse=True))
        for (own, name), tensor in found:
            whole = tensor.detach().float()
            own[name] = (
                torch.nn.Parameter(whole, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else whole
            )

    return hook


def _lower(raised: _Raised) -> Callable[..., None]:
    def hook(part: Any, *_: Any) -> None:
        for (own, name), tensor in raised.pop(id(part), []):
            own[name] = tensor

    return hook
