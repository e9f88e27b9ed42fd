"""The stand-in finds what it says it finds: each rule broken on purpose, and kept."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from .standin.findings import listed

SIDE = "cuda"


def pinned(size=8):
    return torch.zeros(size, pin_memory=True)


def kinds(device):
    return {finding.kind for finding in device.findings}


def test_values_are_those_of_the_cpu(device):
    x = torch.arange(6.0).view(2, 3)
    on = x.to(SIDE)
    assert (on.device, on.is_cuda) == (torch.device("cuda", 0), True)
    assert torch.equal((on @ on.t()).relu_().softmax(-1).cpu(), (x @ x.t()).relu_().softmax(-1))
    on[:, 1] = 7.0
    assert on.cpu().tolist() == [[0.0, 7.0, 2.0], [3.0, 7.0, 5.0]]
    assert not device.findings


def test_both_devices_in_one_operation_raise(device):
    x = torch.ones(3, device=SIDE)
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)
    assert (x + torch.tensor(1.0)).sum().item() == 6.0, "a CPU scalar may take part"
    with pytest.raises(TypeError, match="Use Tensor"):
        x.numpy()


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


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_is_listed(device, name):
    x = torch.ones(8, device=SIDE)
    device.forget()
    WAITS[name](x)
    assert device.syncs and "test_standin" in device.syncs[0].where
    assert not device.findings


def test_what_does_not_wait_is_not_listed(device):
    x = torch.ones(8, device=SIDE)
    device.forget()
    x.copy_(pinned(), non_blocking=True)
    pinned().copy_(x * 2 + 1, non_blocking=True)
    x.index_select(0, torch.zeros(2, dtype=torch.int64, device=SIDE)).sum()
    assert not device.syncs and not device.findings


def test_a_copy_that_was_not_to_wait_from_pageable_memory(device):
    torch.ones(8, device=SIDE).copy_(torch.ones(8), non_blocking=True)
    torch.empty(8).copy_(torch.ones(8, device=SIDE), non_blocking=True)
    assert [finding.kind for finding in device.findings] == ["pageable", "pageable"]


def test_a_strided_copy_between_host_and_device(device):
    torch.ones(4, 4, device=SIDE)[:, 0].copy_(pinned(4), non_blocking=True)
    assert kinds(device) == {"strided"}


def test_pinned_memory_reused_under_a_copy(device):
    device.lag = 100
    buffer, x = pinned(), torch.ones(8, device=SIDE)
    x.copy_(buffer, non_blocking=True)
    buffer.fill_(1.0)
    assert kinds(device) == {"race"}
    device.forget()
    x.copy_(buffer, non_blocking=True)
    torch.cuda.current_stream().record_event().synchronize()
    buffer.fill_(2.0)
    assert not device.findings, "the copy was over"


def test_pinned_memory_read_before_the_copy_is_over(device):
    buffer = pinned()
    buffer.copy_(torch.ones(8, device=SIDE), non_blocking=True)
    buffer.tolist()
    assert kinds(device) == {"race"} and "copy from the device" in listed(device.findings)


def test_an_event_is_reached_after_some_queries(device):
    device.lag = 2
    torch.ones(8, device=SIDE)
    event = torch.cuda.current_stream().record_event()
    assert [event.query() for _ in range(4)] == [False, False, True, True]


@pytest.mark.parametrize("ordered", [False, True])
def test_two_streams(device, ordered):
    x, side = torch.ones(8, device=SIDE), torch.cuda.Stream()
    if ordered:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    if ordered:
        torch.cuda.current_stream().wait_event(side.record_event())
    x.mul_(2)
    assert (kinds(device) == set()) == ordered, listed(device.findings)


def test_a_write_behind_a_read_of_another_stream(device):
    x, side = torch.ones(8, device=SIDE), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x + 1
    x.mul_(2)
    assert "read by" in listed(device.findings)


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
    elsewhere = torch.zeros(3, device=SIDE)  # a new tensor is not the static one
    assert torch.equal(elsewhere, torch.zeros(3, device=SIDE))
    graph.replay()
    assert y.cpu().tolist() == [11.0] * 3 and not device.findings


def test_a_replay_over_freed_memory(device):
    x, graph = torch.ones(3, device=SIDE), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
    del x
    graph.replay()
    assert kinds(device) == {"freed"} and len(y) == 3


def test_memory_ends(device):
    before = torch.cuda.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**40, dtype=torch.uint8, device=SIDE)
    x = torch.zeros(2**20, dtype=torch.uint8, device=SIDE)
    assert torch.cuda.memory_allocated() == before + 2**20
    del x
    assert torch.cuda.memory_allocated() == before
