"""torch.cuda, as far as the project and transformers call it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from .graphs import CUDAGraph, graph
from .kernels import Cudart
from .machine import Machine
from .streams import Event, Stream, current, synchronize


def surface(device: Machine) -> dict[str, Any]:
    """What takes the place of torch.cuda's own names."""
    card = device.card
    properties = SimpleNamespace(
        name=card.name,
        total_memory=card.memory,
        uuid="stand-in",
        multi_processor_count=card.multiprocessors,
        shared_memory_per_block_optin=card.shared_memory,
        major=card.capability[0],
        minor=card.capability[1],
        warp_size=32,
        L2_cache_size=40 * 2**20,
    )

    def always(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    def set_stream(stream: Any) -> None:
        device.stream = stream

    def reset_peak(*_: Any) -> None:
        device.peak = device.allocated

    nothing = always(None)
    return {
        "is_available": always(True),
        "is_initialized": always(True),
        "device_count": always(1),
        "current_device": always(0),
        "init": nothing,
        "_lazy_init": nothing,
        "set_device": nothing,
        "device": always(contextlib.nullcontext()),
        "device_of": always(contextlib.nullcontext()),
        "get_device_name": always(card.name),
        "get_device_properties": always(properties),
        "get_device_capability": always(card.capability),
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda *_: device.stream,
        "default_stream": lambda *_: device.default,
        "stream": current,
        "set_stream": set_stream,
        "synchronize": synchronize,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "graph_pool_handle": always((0, 1)),
        "is_current_stream_capturing": lambda: device.capture is not None,
        "empty_cache": nothing,
        "mem_get_info": lambda *_: (card.memory - device.allocated, card.memory),
        "memory_allocated": lambda *_: device.allocated,
        "memory_reserved": lambda *_: device.allocated,
        "max_memory_allocated": lambda *_: device.peak,
        "reset_peak_memory_stats": reset_peak,
        "cudart": always(Cudart()),
        "manual_seed": nothing,
        "manual_seed_all": nothing,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": nothing,
        "set_sync_debug_mode": nothing,
        "_is_in_bad_fork": always(False),
        "is_bf16_supported": always(True),
    }
