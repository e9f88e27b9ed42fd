"""Runs a 16-bit model in float32 with the same weights: the reference that its 16-bit forwards are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
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


_Raised = dict[int, tuple[torch.Tensor, torch.Tensor]]  # by id: what is float32 now, and its own data


def _parts(module: Any, layers: int) -> Iterator[Any]:
    """The decoder's layers, and the other modules that own weights."""
    found = [x for x in module.modules() if isinstance(x, torch.nn.ModuleList) and len(x) == layers]
    decoder = list(found[0]) if found else []
    inside = {part for layer in decoder for part in layer.modules()}
    yield from decoder
    yield from (part for part in module.modules() if part not in inside and list(_weights(part, recurse=False)))


def _weights(part: Any, recurse: bool) -> Iterator[torch.Tensor]:
    every = chain(part.parameters(recurse=recurse), part.buffers(recurse=recurse))
    return (tensor for tensor in every if tensor.dtype in _HALVES)


def _raise(raised: _Raised) -> Callable[..., None]:
    def hook(part: Any, _: Any) -> None:
        for tensor in list(_weights(part, recurse=True)):
            raised[id(tensor)] = tensor, tensor.data
            tensor.data = tensor.data.float()

    return hook


def _lower(raised: _Raised) -> Callable[..., None]:
    def hook(part: Any, *_: Any) -> None:
        for tensor in chain(part.parameters(), part.buffers()):
            if id(tensor) in raised:
                tensor.data = raised.pop(id(tensor))[1]

    return hook
