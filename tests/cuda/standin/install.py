"""The stand-in in place of torch.cuda, as far as the project and transformers call it, for the time of a `with`."""

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from pensieve.device import graphs
from pensieve.device.attention import register

from . import kernels
from .kernels import Cudart
from .machine import Machine, installed
from .operations import Calls, Dispatch
from .streams import CUDAGraph, Event, Stream, current, graph, synchronize
from .tensors import DeviceTensor

_CUDA, _META = 1, 14  # c10::DeviceType
_REGISTRY, _TYPES = "_ZN3c104impl26device_guard_impl_registryE", 22


def why_not() -> str:
    """Why there can be no stand-in here, in a sentence; "" where there can be."""
    if torch.version.cuda is not None or torch.version.hip is not None:
        return "this torch is built for a GPU, and the stand-in takes the place that a build for CPUs leaves empty"
    if not hasattr(torch._C, "_ensureCUDADeviceGuardSet"):
        return f"torch {torch.__version__} has no _ensureCUDADeviceGuardSet"
    try:
        (ctypes.c_void_p * _TYPES).in_dll(_core(), _REGISTRY)
    except (OSError, ValueError) as error:
        return f"torch {torch.__version__} keeps its device guards elsewhere ({error})"
    return ""


def _core() -> Any:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))


def _guard_nothing() -> None:
    """C++ asks for a guard of the device at every slice, and a build for CPUs has none for CUDA: Meta's, which guards
    nothing, serves."""
    torch._C._ensureCUDADeviceGuardSet()
    registry = (ctypes.c_void_p * _TYPES).in_dll(_core(), _REGISTRY)
    if not registry[_CUDA]:
        registry[_CUDA] = registry[_META]


@contextmanager
def stand_in() -> Iterator[Machine]:
    """torch.cuda is a stand-in inside. One at a time; what was made inside must not be used after it. Skip where why_not()
    has something to say."""
    assert not installed and not why_not()
    import_module("torch._dynamo")  # it looks at torch.cuda when it is imported,
    register()  # and so does transformers
    _guard_nothing()
    device = Machine(lag=3)
    device.default = Stream(name="the compute", owner=device)
    with _replaced(_replacements(device)):
        installed.append(device)
        graphs._side_stream.cache_clear()  # one a process: of this device
        try:
            with Dispatch(), Calls():
                yield device
        finally:
            installed.clear()
            graphs._side_stream.cache_clear()


def _replacements(device: Machine) -> list[tuple[Any, str, Any]]:
    from pensieve.device import kv_tensors
    from pensieve.device.transfers import cuda_link

    run, make_pools, make_generator = threading.Thread.run, kv_tensors.KvTensors.__init__, torch.Generator

    class Generator(make_generator):  # type: ignore[misc, valid-type]
        """Of the CPU, whatever it is asked for."""

        def __new__(cls, device: Any = "cpu") -> Any:
            return make_generator.__new__(make_generator, "cpu")

    def run_under_modes(self: threading.Thread) -> None:
        with Dispatch(), Calls():  # modes belong to a thread
            run(self)

    def make_watched_pools(self: Any, *args: Any, **kwargs: Any) -> None:
        make_pools(self, *args, **kwargs)
        _watch(device, self)

    places: list[tuple[Any, str, Any]] = [(torch.cuda, name, value) for name, value in surface(device).items()]
    places += [
        (torch, "Generator", Generator),
        (torch, "inference_mode", lambda mode=True: torch.no_grad()),  # wrappers of views cannot be inference tensors
        (threading.Thread, "run", run_under_modes),
        (kv_tensors.KvTensors, "__init__", make_watched_pools),
        (cuda_link, "find_batch_call", lambda: kernels.batch_call),
    ]
    if find_spec("triton") is not None:
        from pensieve.device.kernels import triton_backend

        places += [
            (triton_backend, "attend_kernel", kernels.ATTEND),
            (triton_backend, "join_kernel", kernels.JOIN),
            (triton_backend, "write_kernel", kernels.WRITE),
            (triton_backend, "_dot_type", lambda dtype: dtype),
        ]
    return places


def _watch(device: Machine, tensors: Any) -> None:
    """Tokens of the pools one by one: a block may be appended to while its beginning is copied."""
    if not isinstance(tensors.gpu, DeviceTensor):
        return
    token_bytes = tensors.layer_block_bytes // tensors.chunk_tokens
    device.watch_pool(tensors.gpu.inner, tensors.gpu.memory, token_bytes, "the GPU pool")
    if tensors.cpu_blocks:
        memory = device.pinned_memory(tensors.cpu)
        assert memory is not None, "the pool in RAM is not pinned"
        device.watch_pool(tensors.cpu, memory, token_bytes, "the CPU pool")


@contextmanager
def _replaced(places: list[tuple[Any, str, Any]]) -> Iterator[None]:
    missing = object()
    before = [(owner, name, getattr(owner, name, missing)) for owner, name, _ in places]
    for owner, name, value in places:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            if value is missing:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def surface(device: Machine) -> dict[str, Any]:
    """What takes the place of torch.cuda's own names."""
    card = device.card
    properties = SimpleNamespace(
        name=card.name,
        total_memory=card.memory,
        multi_processor_count=card.multiprocessors,
        shared_memory_per_block_optin=card.shared_memory,
        major=card.capability[0],
        minor=card.capability[1],
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
        "_lazy_init": nothing,
        "set_device": nothing,
        "device": always(contextlib.nullcontext()),
        "device_of": always(contextlib.nullcontext()),
        "get_device_name": always(card.name),
        "get_device_properties": always(properties),
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
        "max_memory_allocated": lambda *_: device.peak,
        "reset_peak_memory_stats": reset_peak,
        "cudart": always(Cudart()),
        "manual_seed": nothing,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": nothing,
        "_is_in_bad_fork": always(False),
    }
