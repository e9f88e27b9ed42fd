"""What the CUDA recorder asks of torch, in which order, with a torch.cuda that only writes it down."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest
import torch

from pensieve.device import graphs
from pensieve.device.graphs import CudaRecorder


class Stream:
    def __init__(self, log, name):
        self.log, self.name, self.device_index = log, name, 0

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch):
    said = []
    current = [Stream(said, "compute")]

    @contextmanager
    def stream(entered):
        current.append(entered)
        yield
        current.pop()

    class Graph:
        def replay(self):
            said.append("replay")

    class Capture:
        def __init__(self, graph, pool, stream, capture_error_mode):
            self.stream = stream
            said.append(f"capture on {stream.name} in {pool}, {capture_error_mode}")

        def __enter__(self):
            current.append(self.stream)

        def __exit__(self, kind, *_):
            if kind is not None:  # as torch does: it does not get to setting the stream back
                raise RuntimeError("operation failed due to a previous error during capture")
            current.pop()

    def set_stream(stream):
        current[:] = [stream]

    cuda = {
        "device": lambda device: nullcontext(),
        "current_stream": lambda device=None: current[-1],
        "Stream": lambda device: Stream(said, "aside"),
        "stream": stream,
        "graph_pool_handle": lambda: "pool",
        "CUDAGraph": Graph,
        "graph": Capture,
        "set_stream": set_stream,
    }
    for name, fake in cuda.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(
        torch._C, "_cuda_endAllocateToPool", lambda device, pool: said.append(f"{pool} closed"), raising=False
    )
    graphs._side_stream.cache_clear()
    yield said
    graphs._side_stream.cache_clear()


def test_graphs_are_warmed_and_captured_on_one_side_stream_in_one_pool(log):
    def work():
        log.append(f"work on {torch.cuda.current_stream().name}")
        return torch.ones(1)

    recorder = CudaRecorder(torch.device("cuda", 0))
    replay = recorder.record(work)
    once = ["aside waits for compute", "work on aside", "work on aside", "capture on aside in pool, thread_local"]
    assert log == [*once, "work on aside", "compute waits for aside"]
    assert replay() is replay() and log[-2:] == ["replay", "replay"]
    log.clear()
    CudaRecorder(torch.device("cuda", 0)).record(work)
    assert log[:4] == once, "another worker's recorder uses the same stream"


def test_what_cannot_be_captured_leaves_the_compute_stream_current(log):
    calls = []

    def work():
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.ones(1)

    with pytest.raises(RuntimeError, match="previous error during capture"):
        CudaRecorder(torch.device("cuda", 0)).record(work)
    assert torch.cuda.current_stream().name == "compute"
    assert log[-1] == "pool closed"
