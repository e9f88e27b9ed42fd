"""The stand-in finds what it says it finds: each rule broken on purpose, and faults put into the CUDA path itself."""

from contextlib import suppress

import numpy as np
import pytest
import torch

from pensieve.core.plan import Row, Sample
from pensieve.device.transfers import cuda_link
from pensieve.device.worker import TorchOptions
from pensieve.serve.systems.profiling import swap_in, swap_out
from tests.worker.torch.driver import Hand

from .conftest import needs_triton
from .serving import tiny
from .standin.clocks import listed

SIDE = "cuda"


def pinned(size=8):
    return torch.zeros(size, pin_memory=True)


def kinds(device):
    return {finding.kind for finding in device.findings}


WAITS = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "an index on the host": lambda x: x[torch.tensor([0, 2])],
    "pageable in": lambda x: x.copy_(torch.ones(8)),
    "pinned out, blocking": lambda x: pinned().copy_(x),
    "an event": lambda x: torch.cuda.current_stream().record_event().synchronize(),
}


def test_what_waits_is_listed_and_what_does_not_is_not(device):
    x = torch.ones(8, device=SIDE)
    for name, wait in WAITS.items():
        device.forget()
        wait(x)
        assert device.syncs and "test_standin" in device.syncs[0].where and not device.findings, name
    device.forget()
    pinned().copy_(x * 2 + 1, non_blocking=True)
    x.index_select(0, torch.zeros(2, dtype=torch.int64, device=SIDE)).sum()
    device.assert_clean()


def other_stream(x, before, act, after):
    """Another stream acts, before what this one writes; each may wait for the other."""
    side = torch.cuda.Stream()
    if before:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        act(x)
    if after:
        torch.cuda.current_stream().wait_event(side.record_event())
    x.mul_(2)


def reused(x, over):
    buffer = pinned()
    x.copy_(buffer, non_blocking=True)
    if over:
        torch.cuda.current_stream().record_event().synchronize()
    buffer.fill_(1.0)


def freed(x):
    graph, gone = torch.cuda.CUDAGraph(), torch.ones(3, device=SIDE)
    with torch.cuda.graph(graph):
        x[:3].copy_(gone)
    del gone
    graph.replay()


FOUND = {
    "from pageable memory": (lambda x: x.copy_(torch.ones(8), non_blocking=True), {"pageable"}),
    "to pageable memory": (lambda x: torch.empty(8).copy_(x, non_blocking=True), {"pageable"}),
    "pinned memory reused under a copy": (lambda x: reused(x, False), {"race"}),
    "pinned memory reused after it": (lambda x: reused(x, True), set()),
    "two streams": (lambda x: other_stream(x, False, lambda x: x.add_(1), False), {"race"}),
    "two streams in order": (lambda x: other_stream(x, True, lambda x: x.add_(1), True), set()),
    "a write behind a read of another stream": (lambda x: other_stream(x, True, lambda x: x + 1, False), {"race"}),
    "a replay over freed memory": (freed, {"freed"}),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_breaks_a_rule_is_found(device, name):
    device.lag, (act, found) = 100, FOUND[name]
    act(torch.ones(8, device=SIDE))
    assert kinds(device) == found, listed(device.findings)


@pytest.mark.parametrize(
    "act", [lambda x: x[0].item(), lambda x: x.copy_(pinned(), non_blocking=True), lambda x: torch.cuda.synchronize()]
)
def test_what_a_capture_forbids(device, act):
    x, graph = torch.ones(8, device=SIDE), torch.cuda.CUDAGraph()
    with suppress(RuntimeError), torch.cuda.graph(graph):
        x.add_(1)
        act(x)
    torch.cuda.set_stream(torch.cuda.default_stream())
    assert "capture" in kinds(device), listed(device.findings)


def scenario(device):
    """Two plans in flight all along: a prompt, blocks that leave while it is computed and come back elsewhere, decodes."""
    hand = Hand(tiny(), TorchOptions(depth=2, max_batch_requests=2))
    device.forget()
    device.lag = 200
    prompt = Row(0, ((0, 40),), tuple(range(3, 43)), Sample(40))
    hand.launch(prompt, tables=((0, 0, (3, 4, 5, 6, 7, 8, 9)),))
    hand.launch(hand.decode(40), moves=(swap_out(1, (3, 4), (0, 1)),))
    hand.collect()
    hand.launch(hand.decode(41))
    hand.collect()
    hand.worker.transfer.finish()
    hand.launch(hand.decode(42), tables=((0, 0, (20, 21)),), moves=(swap_in(2, (0, 1), (20, 21)),))
    hand.collect()
    hand.launch(hand.decode(43, temperature=1.0, top_p=0.9))
    hand.collect()
    hand.launch(hand.decode(44))
    hand.close()


def one_upload_buffer_for_all():
    """In place of pinned memory of its own for each iteration."""
    buffer = torch.empty(8192, dtype=torch.int64, pin_memory=True)

    def upload(arrays, device):
        whole = torch.from_numpy(np.concatenate(arrays))
        buffer[: len(whole)].copy_(whole)
        return buffer[: len(whole)].to(device, non_blocking=True).split([len(array) for array in arrays])

    return upload


@needs_triton
def test_nothing_is_found_without_them(device):
    scenario(device)
    waits = device.waits("cuda_link.py", "test_standin.py")
    assert not device.findings and not waits, listed([*device.findings, *waits])


LINK, ENQUEUE = "pensieve.device.transfers.cuda_link.CudaLink", cuda_link.CudaLink.enqueue
MUTATIONS = {
    "no hold before compute": (f"{LINK}.hold_compute", lambda: lambda self, mark: None, "race", "graphs.py"),
    "no wait of swap-outs for compute": (
        f"{LINK}.enqueue", lambda: lambda self, haul, inward, after=(): ENQUEUE(self, haul, inward), "race",
        "driver|cuda_link.py",
    ),
    "tokens read early": ("pensieve.device.flight.Flight.wait", lambda: lambda self: None, "race", "flight.py"),
    "one upload buffer": ("pensieve.device.batch._upload", one_upload_buffer_for_all, "race", "batch.py"),
    "lists from pageable memory": (
        "pensieve.device.kernels.triton_backend.send",
        lambda: lambda values, target: target.copy_(torch.from_numpy(values), non_blocking=True), "pageable",
        "test_standin.py|triton_backend.py",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
@needs_triton
def test_each_is_found(device, monkeypatch, name):
    place, made, kind, places = MUTATIONS[name]
    monkeypatch.setattr(place, made())
    scenario(device)
    found = [finding for finding in device.findings if finding.kind == kind]
    assert any(place in finding.where for finding in found for place in places.split("|")), listed(device.findings)
