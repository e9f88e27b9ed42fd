"""Random conversations through both tiers: every token is the plain model's, nothing races, nothing waits but for tokens."""

from __future__ import annotations

import pytest
import torch

from pensieve.core.plan import Moved, Row, Sample
from pensieve.device.options import TorchOptions
from pensieve.device.transfers import lanes
from pensieve.errors import HardwareMissing
from pensieve.serve.systems.profiling import swap_in, swap_out

from .conftest import needs_triton
from .serving import CHUNK, REQUESTS, Hand, converse, plain_token, tiny, wrong_tokens
from .standin.findings import listed

DEEP = TorchOptions(depth=2, max_batch_requests=REQUESTS)


def check(served, name):
    served.assert_clean()
    wrong, total = wrong_tokens(served.engine.turns, name)
    assert total > 150 and wrong == 0, f"{wrong} of {total} tokens are wrong"


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(
    ("name", "fused", "mode", "depth", "seed"),
    [("llama", True, "load", 2, 4), ("gemma2", True, "hybrid", 2, 5), ("llama", False, "hybrid", 1, 4)],
)
def test_conversations(device, name, fused, mode, depth, seed):
    """More than both tiers hold: swaps both ways, drops, recomputation with holes, suspension."""
    options = TorchOptions(depth=depth, max_batch_requests=REQUESTS)
    model = tiny(name, fused)
    device.lag = 6
    served = converse(device, model, mode, options, 24, seed)
    check(served, name)
    paths = served.paths
    assert paths.gpu_hit and paths.cpu_restore and paths.preempted and paths.recompute
    assert mode == "load" or (paths.again and paths.hole)
    assert (served.settings["graphs"], served.counts["replays"] > 20) == ("on", True)
    assert served.settings["depth"] == depth


@needs_triton
def test_replays_and_copies_of_a_short_conversation(device):
    """What the slow ones do at length."""
    served = converse(device, tiny(), "load", DEEP, 5, 4)
    served.assert_clean()
    wrong, total = wrong_tokens(served.engine.turns, "llama")
    assert wrong == 0 and total > 20 and served.counts["replays"] > 10


@pytest.mark.parametrize("attention", ["reference", pytest.param("triton", marks=needs_triton)])
def test_without_graphs(device, attention):
    """Swap-ins wait layer by layer. The reference needs nothing but torch, and looks at block tables on the host."""
    hand = Hand(tiny(attention=attention), TorchOptions(depth=1, max_batch_requests=2, graphs=False))
    assert hand.settings["graphs"] == "off" and hand.settings["attention_backend"] == attention
    device.forget()
    known = hand.prompt()
    hand.step(moves=(swap_out(1, (3, 4), (0, 1)),))
    while Moved(1) not in hand.worker.transfer.moved():
        hand.worker.transfer.wait()
    device.lag = 50
    row = Row(0, ((40, 43),), (known[40], 5, 6), Sample(43))
    result = hand.step(row, tables=((0, 0, (20, 21)),), moves=(swap_in(2, (0, 1), (20, 21)),))
    assert plain_token([*known[:41], 5, 6]) == result.tokens[0]
    assert not device.findings, listed(device.findings)
    hand.close()


@needs_triton
@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("llama", True),
        ("gemma2", False),
        *(pytest.param(*kind, marks=pytest.mark.slow) for kind in (("qwen3", True), ("gpt2", True))),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in ("mistral", "olmo2")),
    ],
)
def test_models_are_captured_and_wait_for_nothing(device, name, fused):
    """On the forwards written here and on transformers' own: prefill and decode, greedy and by chance."""
    hand = Hand(tiny(name, fused), TorchOptions(depth=2, max_batch_requests=1))
    assert hand.settings["graphs"] == "on"
    assert hand.worker.model.forward.name == ("fused" if fused else "transformers")
    device.forget()
    device.lag = 20
    known = hand.prompt()
    replays = device.counts["replays"]
    hand.launch(hand.decode(40))
    hand.launch(hand.decode(41, temperature=1.0, top_p=0.9, top_k=20))
    known += [hand.collect().tokens[0] for _ in range(2)]
    assert device.counts["replays"] == replays + 2
    waits = [sync for sync in device.syncs if "flight.py" not in sync.where]
    assert not device.findings and not waits, listed([*device.findings, *waits])
    wrong = [token for at, token in enumerate(known[40:42]) if token != plain_token(known[: 40 + at], name)]
    assert not wrong
    hand.close()


@needs_triton
def test_a_capture_that_fails_leaves_the_eager_forward(device, monkeypatch):
    """On the stream it had, and with the same tokens; whatever waits in a capture is refused by CUDA."""
    from dataclasses import replace

    model = tiny()

    def waiting(iteration, wanted):
        logits = model.forward(iteration, wanted)
        if torch.cuda.is_current_stream_capturing():
            logits[0, 0].item()
        return logits

    waiting.name = "waiting"
    hand = Hand(replace(model, forward=waiting), TorchOptions(depth=2, max_batch_requests=2))
    assert hand.settings["graphs"].startswith("not recorded: RuntimeError")
    assert torch.cuda.current_stream() is torch.cuda.default_stream()
    device.forget()
    known = hand.prompt()
    token = hand.step(hand.decode(40)).tokens[0]
    assert plain_token(known) == token
    assert not device.findings
    hand.close()


@needs_triton
@pytest.mark.parametrize(("graphs", "waits"), [(True, 1), (False, 2)])
def test_a_replay_waits_once_for_a_load(device, monkeypatch, graphs, waits):
    """For its last layer, which comes last; the eager forward waits for each of its two layers."""
    hand = Hand(tiny(), TorchOptions(depth=2, max_batch_requests=1, graphs=graphs))
    known = hand.prompt()
    hand.step(moves=(swap_out(1, (3, 4), (0, 1)),))
    hand.worker.transfer.finish()
    device.forget()
    device.lag = 200
    held = []
    hold = lanes.CudaLink.hold_compute
    monkeypatch.setattr(lanes.CudaLink, "hold_compute", lambda self, mark: (held.append(mark), hold(self, mark)))
    result = hand.step(hand.decode(40), tables=((0, 0, (20, 21)),), moves=(swap_in(2, (0, 1), (20, 21)),))
    assert len(held) == waits and not device.findings, listed(device.findings)
    assert plain_token(known) == result.tokens[0]
    hand.close()


def test_a_pool_beyond_the_device_is_a_sentence(device):
    with pytest.raises(HardwareMissing, match=r"A KV pool of .* does not fit in CUDA memory"):
        Hand(tiny(attention="reference"), DEEP, blocks=2 * device.card.memory // (CHUNK * 2 * 2 * 2 * 16 * 4))


@needs_triton
def test_a_block_is_appended_to_while_its_beginning_is_copied(device):
    """A conversation returns during its swap-out: the copy's tail is torn, and nobody uses it."""
    hand = Hand(tiny(), TorchOptions(depth=2, max_batch_requests=1))
    device.forget()
    device.lag = 200
    known = hand.prompt(tokens=36)  # the last of its blocks holds four tokens
    hand.launch(moves=(swap_out(1, (7,), (0,)),))
    hand.launch(Row(0, ((36, 38),), (known[36], 9), Sample(38)))
    hand.collect()
    hand.collect()
    assert not device.findings, listed(device.findings)
    hand.worker.transfer.finish()
    hand.step(hand.decode(38), tables=((0, 4, (30,)),), moves=(swap_in(2, (0,), (30,)),))  # as no scheduler would
    assert {finding.kind for finding in device.findings} == {"torn"}
    hand.close()
