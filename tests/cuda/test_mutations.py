"""Faults put into the CUDA path on purpose: without them the stand-in finds nothing, and with each of them it does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pensieve.core.plan import Row, Sample
from pensieve.device import batch, flight
from pensieve.device.transfers import cuda_link, pinned
from pensieve.device.worker import TorchOptions
from pensieve.serve.systems.profiling import swap_in, swap_out

from .conftest import needs_triton
from .serving import Hand, tiny
from .standin.clocks import listed

pytestmark = needs_triton
Patch = pytest.MonkeyPatch


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


def no_hold_before_compute(patch):
    patch.setattr(cuda_link.CudaLink, "hold_compute", lambda self, mark: None)


def no_wait_of_swap_outs_for_compute(patch):
    enqueue = cuda_link._CudaLane.enqueue
    patch.setattr(cuda_link._CudaLane, "enqueue", lambda self, haul, after: enqueue(self, haul, ()))


def tokens_read_early(patch):
    patch.setattr(flight.Flight, "wait", lambda self: None)


def one_upload_buffer_for_all(patch):
    buffer = torch.empty(8192, dtype=torch.int64, pin_memory=True)

    def upload(arrays, device):
        starts = np.cumsum([0, *(len(array) + len(array) % 2 for array in arrays)]).tolist()
        for start, array in zip(starts[:-1], arrays, strict=True):
            buffer[start : start + len(array)].copy_(torch.from_numpy(array))
        there = buffer[: starts[-1]].to(device, non_blocking=True)
        return [there[start : start + len(array)] for start, array in zip(starts[:-1], arrays, strict=True)]

    patch.setattr(batch, "_upload", upload)


def lists_sent_from_pageable_memory(patch):
    def send(values, target):
        target.copy_(torch.from_numpy(values), non_blocking=True)

    from pensieve.device.kernels import triton_backend

    patch.setattr(pinned, "send", send)
    patch.setattr(triton_backend, "send", send)


def test_nothing_is_found_without_them(device):
    scenario(device)
    waits = device.waits("cuda_link.py", "test_mutations.py")
    assert not device.findings and not waits, listed([*device.findings, *waits])


MUTATIONS = [
    (no_hold_before_compute, "race", "graphs.py"),
    (no_wait_of_swap_outs_for_compute, "race", "driver|cuda_link.py"),
    (tokens_read_early, "race", "flight.py"),
    (one_upload_buffer_for_all, "race", "batch.py"),
    (lists_sent_from_pageable_memory, "pageable", "test_mutations.py|triton_backend.py"),
]


@pytest.mark.parametrize(("mutate", "kind", "places"), MUTATIONS, ids=lambda x: getattr(x, "__name__", ""))
def test_each_is_found(device, monkeypatch, mutate, kind, places):
    mutate(monkeypatch)
    scenario(device)
    found = [finding for finding in device.findings if finding.kind == kind]
    assert any(place in finding.where for finding in found for place in places.split("|")), listed(device.findings)


@pytest.mark.parametrize("quarantine", [True, False])
def test_a_block_given_to_a_load_while_a_plan_still_writes_it(device, quarantine):
    """What the cache's quarantine prevents. (The engine guards it a second time: it gives up the blocks of a request only
    once every plan that computes it is collected, so that conversations alone do not show the fault.)"""
    hand = Hand(tiny(), TorchOptions(depth=2, max_batch_requests=2))
    hand.prompt(0)
    hand.prompt(1, first_block=20)
    hand.step(moves=(swap_out(1, (20, 21), (0, 1)),))
    hand.worker.transfer.finish()
    device.forget()
    device.lag = 200
    hand.launch(hand.decode(40))  # writes to block 8
    if quarantine:
        hand.collect()
    hand.launch(moves=(swap_in(2, (0, 1), (7, 8)),))
    assert ("race" in {finding.kind for finding in device.findings}) != quarantine, listed(device.findings)
    hand.close()
