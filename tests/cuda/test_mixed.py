"""A library computes the prompts of an iteration and this project's kernel its decode rows; on the stand-in for both."""

from __future__ import annotations

import random
import sys
from dataclasses import replace

import pytest

from pensieve.plan import Row, Sample
from pensieve.worker.torch.kernels import flashinfer
from pensieve.worker.torch.model import LoadedModel
from pensieve.worker.torch.options import TorchOptions

from .conftest import needs_triton
from .serving import REQUESTS, Hand, converse, plain_token, tiny, wrong_tokens
from .standin.findings import listed
from .standin.flashinfer import Wrapper, module
from .standin.machine import Machine

pytestmark = needs_triton
LAYERS = 2


@pytest.fixture
def mixed(device: Machine, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """In float32, which the library would refuse, so that tokens can be compared with the plain model's."""
    from pensieve.worker.torch.kernels.mixed import MixedBackend
    from pensieve.worker.torch.kernels.triton_backend import TritonBackend

    monkeypatch.setitem(sys.modules, "flashinfer", module())
    monkeypatch.setattr(flashinfer, "_WORKSPACE_BYTES", 1024)
    backend = MixedBackend(flashinfer.FlashInferBackend(), TritonBackend())
    return replace(tiny(attention="triton"), attention=backend)


def serve(device: Machine, model: LoadedModel, depth: int, pieces: int) -> tuple[Hand, list[int], list[int]]:
    """Slot 0 decodes while slot 1 computes a prompt in pieces of 6; `depth` plans in flight. Both slots' tokens."""
    hand = Hand(model, TorchOptions(depth=depth, max_batch_requests=2, copies="dma"))
    assert (hand.settings["attention_backend"], hand.settings["graphs"]) == ("flashinfer+triton", "on")
    known = hand.prompt()
    source = random.Random(1)
    prompt = [source.randrange(3, 97) for _ in range(6 * pieces)]
    device.forget()
    device.lag = 200
    Wrapper.runs = Wrapper.rows = 0
    tables = ((1, 0, tuple(range(20, 30))),)
    for piece in range(pieces):
        start, stop = 6 * piece, 6 * piece + 6
        sample = Sample(stop) if piece == pieces - 1 else None
        hand.launch(hand.decode(40 + piece), Row(1, ((start, stop),), tuple(prompt[start:stop]), sample), tables=tables)
        tables = ()
        if piece >= depth - 1:
            result = hand.collect()
            known.append(result.tokens[0])
            prompt += [result.tokens[1]] if 1 in result.tokens else []
    while hand.worker._flights:
        result = hand.collect()
        known.append(result.tokens[0])
        prompt += [result.tokens[1]] if 1 in result.tokens else []
    return hand, known, prompt


@pytest.mark.parametrize("depth", [1, 2])
def test_prompts_and_decode_rows_of_one_plan(device: Machine, mixed: LoadedModel, depth: int) -> None:
    """Every token is the plain model's, nothing races; the library computes the prompt's rows and no other. Plans of decode
    rows alone are replayed, and the library does not see them."""
    hand, known, prompt = serve(device, mixed, depth, 4)
    assert (Wrapper.runs, Wrapper.rows) == (4 * LAYERS, 24 * LAYERS)
    assert len(known) == 45 and len(prompt) == 25
    assert all(plain_token(known[:at]) == known[at] for at in range(40, 45))
    assert plain_token(prompt[:24]) == prompt[24]

    replays = device.counts["replays"]
    result = hand.step(hand.decode(44), hand.decode(24, slot=1))
    assert (result.tokens[0], result.tokens[1]) == (plain_token(known), plain_token(prompt))
    assert (Wrapper.runs, device.counts["replays"]) == (4 * LAYERS, replays + 1)
    waits = [sync for sync in device.syncs if "flight.py" not in sync.where]
    assert not device.findings and not waits, listed([*device.findings, *waits])
    hand.close()


def test_one_buffer_of_the_library_for_all_plans_is_found(
    device: Machine, mixed: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixed.attention._prompts, "_wrappers", [{}])
    serve(device, mixed, 2, 4)[0].close()
    assert {finding.kind for finding in device.findings} == {"race"}
    assert "pinned memory" in listed(device.findings) and "flashinfer.py" in listed(device.findings)


def test_conversations(device: Machine, mixed: LoadedModel) -> None:
    options = TorchOptions(depth=2, max_batch_requests=REQUESTS, copies="dma")
    served = converse(device, mixed, "hybrid", options, 6, 4)
    served.assert_clean()
    wrong, total = wrong_tokens(served.engine.turns, "llama")
    assert wrong == 0 and total > 20 and served.counts["replays"] > 10 and Wrapper.runs > 10
