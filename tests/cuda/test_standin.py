"""The stand-in finds what it says it finds: each rule broken on purpose, and kept."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from .standin.clocks import listed

SIDE = "cuda"


def pinned(size=8):
    return torch.zeros(size, pin_memory=True)


def kinds(device):
    return {finding.kind for finding in device.findings}


def test_values_are_those_of_the_cpu_and_devices_do_not_mix(device):
    x = torch.arange(6.0).view(2, 3)
    on = x.to(SIDE)
    assert (on.device, on.is_cuda) == (torch.device("cuda", 0), True)
    assert torch.equal((on @ on.t()).relu_().softmax(-1).cpu(), (x @ x.t()).relu_().softmax(-1))
    on[:, 1] = 7.0
    assert on.cpu().tolist() == [[0.0, 7.0, 2.0], [3.0, 7.0, 5.0]]
    assert (on + torch.tensor(1.0)).sum().item() == 30.0, "a CPU scalar may take part"
    assert not device.findings
    with pytest.raises(RuntimeError, match="same device"):
        on + x
    with pytest.raises(TypeError, match="Use Tensor"):
        on.numpy()


WAITS = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "bool": lambda x: bool(x[0] > 0),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "an index on the host": lambda x: x[torch.tensor([0, 2])],
    "equal": lambda x: torch.equal(x, x),
    "pageable in": lambda x: x.copy_(torch.ones(8)),
    "pinned in, blocking": lambda x: x.copy_(pinned()),
    "pinned out, blocking": lambda x: pinned().copy_(x),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "an event": lambda x: torch.cuda.current_stream().record_event().synchronize(),
}


def test_what_waits_is_listed_and_what_does_not_is_not(device):
    x = torch.ones(8, device=SIDE)
    for name, wait in WAITS.items():
        device.forget()
        wait(x)
        assert device.syncs and "test_standin" in device.syncs[0].where, name
        assert not device.findings, name
    device.forget()
    x.copy_(pinned(), non_blocking=True)
    pinned().copy_(x * 2 + 1, non_blocking=True)
    x.index_select(0, torch.zeros(2, dtype=torch.int64, device=SIDE)).sum()
    device.assert_clean()


def other_stream(x, ordered):
    side = torch.cuda.Stream()
    if ordered:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    if ordered:
        torch.cuda.current_stream().wait_event(side.record_event())
    x.mul_(2)


def read_beside(x):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x + 1
    x.mul_(2)


def reused(x, over):
    buffer = pinned()
    x.copy_(buffer, non_blocking=True)
    if over:
        torch.cuda.current_stream().record_event().synchronize()
    buffer.fill_(1.0)


def read_early(x):
    buffer = pinned()
    buffer.copy_(x, non_blocking=True)
    buffer.tolist()


def freed(x):
    graph, gone = torch.cuda.CUDAGraph(), torch.ones(3, device=SIDE)
    with torch.cuda.graph(graph):
        x[:3].copy_(gone)
    del gone
    graph.replay()


FOUND = {
    "from pageable memory": (lambda x: x.copy_(torch.ones(8), non_blocking=True), {"pageable"}),
    "to pageable memory": (lambda x: torch.empty(8).copy_(x, non_blocking=True), {"pageable"}),
    "strided": (lambda x: torch.ones(4, 4, device=SIDE)[:, 0].copy_(pinned(4), non_blocking=True), {"strided"}),
    "pinned memory reused under a copy": (lambda x: reused(x, False), {"race"}),
    "pinned memory reused after it": (lambda x: reused(x, True), set()),
    "pinned memory read before the copy is over": (read_early, {"race"}),
    "two streams": (lambda x: other_stream(x, False), {"race"}),
    "two streams in order": (lambda x: other_stream(x, True), set()),
    "a write behind a read of another stream": (read_beside, {"race"}),
    "a replay over freed memory": (freed, {"freed"}),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_breaks_a_rule_is_found(device, name):
    device.lag, (act, found) = 100, FOUND[name]
    act(torch.ones(8, device=SIDE))
    assert kinds(device) == found, listed(device.findings)


def test_an_event_is_reached_after_some_queries(device):
    device.lag = 2
    torch.ones(8, device=SIDE)
    event = torch.cuda.current_stream().record_event()
    assert [event.query() for _ in range(4)] == [False, False, True, True]


@pytest.mark.parametrize("tail", [False, True])
def test_a_block_is_overwritten_while_it_is_copied(device, tail):
    """Its second half may be, where nobody reads that half from the copy."""
    device.lag = 100
    pool, kept = torch.zeros(8, device=SIDE), pinned()
    device.watch_pool(pool.inner, pool.memory, 16, "pool")  # two cells of four elements
    device.watch_pool(kept, device.pinned_memory(kept), 16, "kept")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        kept.copy_(pool, non_blocking=True)
    pool[4:].fill_(1.0)
    torch.cuda.current_stream().wait_event(side.record_event())
    back = torch.zeros(8, device=SIDE)
    device.watch_pool(back.inner, back.memory, 16, "back")
    back.copy_(kept, non_blocking=True)
    assert not device.findings, listed(device.findings)
    (back[:4] if tail else back[4:]).sum()
    assert kinds(device) == (set() if tail else {"torn"})


BREAKS = {
    "item": lambda x: x[0].item(),
    "from the host": lambda x: x.copy_(pinned(), non_blocking=True),
    "pinned memory": lambda x: torch.ones(8).pin_memory(),
    "query": lambda x: torch.cuda.Event().query() or torch.cuda.current_stream().record_event().query(),
    "synchronize": lambda x: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_a_capture_forbids(device, name):
    x, graph = torch.ones(8, device=SIDE), torch.cuda.CUDAGraph()
    with suppress(RuntimeError), torch.cuda.graph(graph):
        x.add_(1)
        BREAKS[name](x)
    torch.cuda.set_stream(torch.cuda.default_stream())
    assert "capture" in kinds(device), listed(device.findings)


def test_a_graph_repeats_on_the_same_memory(device):
    x, graph = torch.ones(3, device=SIDE), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2 + 1
    x.fill_(5.0)
    graph.replay()
    assert y.cpu().tolist() == [11.0] * 3
    assert not device.findings


def test_memory_ends(device):
    before = torch.cuda.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**40, dtype=torch.uint8, device=SIDE)
    x = torch.zeros(2**20, dtype=torch.uint8, device=SIDE)
    assert torch.cuda.memory_allocated() == before + 2**20
    del x
    assert torch.cuda.memory_allocated() == before
