"""FlashInfer with two plans in flight: its plan() copies from one page-locked buffer, which the next plan() rewrites."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from pensieve.device.options import TorchOptions
from pensieve.plugins.device import flashinfer
from pensieve.plugins.device.flashinfer import FlashInferBackend

from .serving import Hand, tiny
from .standin.findings import listed
from .standin.flashinfer import Wrapper, module
from .standin.machine import Machine


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", module())
    monkeypatch.setattr(flashinfer, "_WORKSPACE_BYTES", 1024)


def decode(device: Machine, depth: int) -> None:
    model = replace(tiny(attention="reference"), attention=FlashInferBackend())
    hand = Hand(model, TorchOptions(depth=depth, graphs=False))
    hand.prompt()
    device.forget()
    device.lag = 200
    for ahead in range(depth):
        hand.launch(hand.decode(40 + ahead))
    for position in range(40 + depth, 46):
        hand.collect()
        hand.launch(hand.decode(position))
    hand.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_plan_in_flight_keeps_its_buffer(device: Machine, library: None, depth: int) -> None:
    decode(device, depth)
    assert not device.findings, listed(device.findings)
    assert Wrapper.made == 2, "two wrappers for the one kind of layer, however many plans"


def test_one_wrapper_for_all_plans_is_found(device: Machine, library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "PLANS_IN_FLIGHT", 1)
    decode(device, 1)
    assert not device.findings, "with one plan in flight one is enough"
    decode(device, 2)
    assert {finding.kind for finding in device.findings} == {"race"}
    assert "pinned memory" in listed(device.findings) and "flashinfer.py" in listed(device.findings)
