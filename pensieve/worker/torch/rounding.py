"""How far rounding alone moves a model's logits: what two right ways to compute it in 16 bits may differ by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def nudged(module: Any, layers: int) -> Iterator[None]:
    """Inside, every element that one of the decoder's layers hands on is moved up or down by the epsilon of its type,
    or not at all, by chance (the same each time).

    Nothing is moved where no list of `layers` modules is found.
    """
    found = [x for x in module.modules() if isinstance(x, torch.nn.ModuleList) and len(x) == layers]
    hooks = [layer.register_forward_hook(_nudge(index)) for index, layer in enumerate(found[0] if found else ())]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _nudge(seed: int) -> Any:
    def hook(_: Any, __: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        chance = torch.Generator(hidden.device).manual_seed(seed)
        steps = torch.randint(-1, 2, hidden.shape, generator=chance, device=hidden.device)
        moved = (hidden.float() * (1 + torch.finfo(hidden.dtype).eps * steps)).to(hidden.dtype)
        return (moved, *output[1:]) if isinstance(output, tuple) else moved

    return hook
