"""What a step reports, and what it leaves alone."""

import pytest
import torch

from pensieve.core.plan import Moved
from pensieve.device.model import LoadedModel
from pensieve.serve.systems.profiling import swap_out

from .driver import Hand, plain_logits, tiny_model


def test_a_step_reports_times_and_margins(llama: LoadedModel) -> None:
    hand = Hand(llama, keep_logits=True)
    result = hand.step(moves=(swap_out(3, (0,), (1,)),))
    assert (result.moved, result.tokens, result.ended_ns, result.compute_ns) == ((Moved(3),), {}, None, 0)
    assert result.stall_ns > 0
    before = hand.worker._clock.now_ns()
    result = hand.step(hand.prompt_row(4, 12), tables=((4, 0, (3, 4)),))
    top = torch.topk(hand.worker.last_logits[4], 2)
    assert result.tokens == {4: int(top.indices[0])}
    assert result.margins[4] == pytest.approx(float(top.values[0] - top.values[1]), abs=1e-6)
    assert result.ended_ns is not None
    assert before < result.ended_ns <= hand.worker._clock.now_ns()
    assert 0 < result.compute_ns <= result.ended_ns - before
    assert (result.h2d_bytes, result.d2h_bytes, result.stall_ns) == (0, 0, 0)


@pytest.mark.parametrize(("attention", "value"), [("reference", float("inf")), ("auto", float("nan"))])
def test_a_row_whose_logits_are_not_finite_leaves_the_others_exact(attention: str, value: float) -> None:
    """Long and short contexts and a prefill beside it: of each step the tokens are those of a batch without the row. What it
    left in its blocks is not read by who gets them next."""
    hand = Hand(tiny_model("llama", attention=attention), blocks=50, keep_logits=True)
    hand.worker.tensors.gpu.fill_(float("nan"))
    lengths = {0: 12, 1: 70, 2: 11}
    known = {slot: hand.prompt(slot, length, 1 + 12 * slot) for slot, length in lengths.items()}
    hand.worker.tensors.gpu[:, 1] = value
    decodes, prompt = (hand.decode(length, slot) for slot, length in lengths.items()), hand.prompt_row(3, 9)
    result = hand.step(*decodes, prompt, tables=((3, 0, (40, 41)),))
    assert (result.not_finite, sorted(result.tokens)) == ((0,), [1, 2, 3])
    assert set(result.margins) == set(result.tokens)
    known[3] = list(prompt.tokens or ())
    exact(hand, known, 1, 2, 3)
    known[1].append(result.tokens[1])
    row = hand.prompt_row(4, 13)
    known[4] = list(row.tokens or ())
    hand.step(row, hand.decode(71, 1), tables=((4, 0, (1, 2)),))
    exact(hand, known, 1, 4)


def exact(hand: Hand, known: dict[int, list[int]], *slots: int) -> None:
    """The last step's logits of these slots are transformers', over all that is known of each."""
    for slot in slots:
        expected = plain_logits(hand.worker.model, known[slot])[-1]
        assert float((hand.worker.last_logits[slot] - expected).abs().max()) <= 1e-4
