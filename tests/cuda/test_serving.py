"""Random conversations through both tiers: every token is the plain model's, nothing races, nothing waits but for tokens."""

from dataclasses import replace

import pytest
import torch

from pensieve.core.plan import Moved, Row, Sample
from pensieve.device.graphs import buckets_up_to
from pensieve.device.worker import TorchOptions
from pensieve.errors import HardwareMissing
from pensieve.serve.systems.profiling import swap_in, swap_out
from tests.worker.torch.driver import CHUNK, Hand

from .conftest import needs_triton
from .serving import REQUESTS, converse, plain_token, tiny, wrong_tokens
from .standin.clocks import listed

DEEP = TorchOptions(depth=2, max_batch_requests=REQUESTS)


@needs_triton
@pytest.mark.parametrize(
    ("name", "mode", "turns"), [("llama", "load", 5), pytest.param("gemma2", "hybrid", 12, marks=pytest.mark.slow)]
)
def test_conversations(device, name, mode, turns):
    """At length, more than both tiers hold: swaps both ways, drops, recomputation with holes, suspension."""
    device.lag = 6
    engine, paths, replays = converse(device, tiny(name), mode, DEEP, turns, returns=0 if turns == 5 else 2)
    wrong, total = wrong_tokens(engine.turns, name)
    assert wrong == 0 and total > (20 if turns == 5 else 75), f"{wrong} of {total} tokens are wrong"
    assert replays > 10
    if turns > 5:
        assert (
            paths.gpu_hit and paths.cpu_restore and paths.preempted and paths.recompute and paths.again and paths.hole
        )


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
    [("llama", True), ("gemma2", False)],
)
def test_models_are_captured_and_wait_for_nothing(device, name, fused):
    """On the forwards written here and on transformers' own: prefill and decode, greedy and by chance."""
    hand = Hand(tiny(name, fused), TorchOptions(depth=2, max_batch_requests=1))
    assert hand.settings["graphs"] == "on"
    assert hand.worker.model.forward.name == ("fused" if fused else "transformers")
    device.forget()
    device.lag = 20
    known = hand.prompt()
    replays = device.replays
    hand.launch(hand.decode(40))
    hand.launch(hand.decode(41, temperature=1.0, top_p=0.9, top_k=20))
    known += [hand.collect().tokens[0] for _ in range(2)]
    assert device.replays == replays + 2
    device.assert_clean()
    wrong = [token for at, token in enumerate(known[40:42]) if token != plain_token(known[: 40 + at], name)]
    assert not wrong
    hand.close()


@needs_triton
def test_every_batch_size_is_replayed_and_padding_writes_to_a_block_of_its_own(device):
    """Conversations of different lengths join and leave again: every bucket, with and without padding."""
    blocks, sizes = 60, [1, 3, 4, 9, 7, 2]
    hand = Hand(tiny(), TorchOptions(max_batch_requests=12), blocks)
    assert hand.settings["graph_buckets"] == list(buckets_up_to(12)) == [1, 2, 4, 8, 12]
    pool, known = hand.worker.tensors.gpu, {}
    assert len(pool[0]) == blocks + 1, "the last one is nobody's"
    for slot in range(12):
        known[slot] = hand.prompt(slot, 3 + 5 * (slot % 5), first_block=3 + 4 * slot)
    before = device.replays
    for size in sizes:
        slots = range(12 - size, 12)
        result = hand.step(*(hand.decode(len(known[slot]) - 1, slot) for slot in slots))
        for slot in slots:
            assert result.tokens[slot] == plain_token(known[slot]), (size, slot)
            known[slot].append(result.tokens[slot])
    assert device.replays == before + len(sizes), "nothing was left to the eager forward"
    written = {int(block) for block in pool.cpu().flatten(2).any(-1).any(0).nonzero()}
    assert blocks in written and max(written - {blocks}) < 3 + 4 * 12
    hand.close()


@needs_triton
def test_a_capture_that_fails_leaves_the_eager_forward(device, monkeypatch):
    """On the stream it had, and with the same tokens; whatever waits in a capture is refused by CUDA."""
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
