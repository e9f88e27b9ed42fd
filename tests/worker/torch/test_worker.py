"""What a step reports, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch

from pensieve.core.plan import Moved
from pensieve.device.model import LoadedModel
from pensieve.serve.systems.profiling import swap_out

from .driver import Driver, random_tokens, tiny_model


def test_a_step_reports_times_and_margins(llama: LoadedModel) -> None:
    driver = Driver(llama)
    result = driver.perform(moves=[swap_out(3, (0,), (1,))])
    assert (result.moved, result.tokens, result.ended_ns, result.compute_ns) == ((Moved(3),), {}, None, 0)
    assert result.stall_ns > 0
    before = driver.worker._clock.now_ns()
    result = driver.step(driver.prompt_row(4, random_tokens(12, 0)))
    top = torch.topk(driver.worker.last_logits[4], 2)
    assert result.tokens == {4: int(top.indices[0])}
    assert result.margins[4] == pytest.approx(float(top.values[0] - top.values[1]), abs=1e-6)
    assert result.ended_ns is not None
    assert before < result.ended_ns <= driver.worker._clock.now_ns()
    assert 0 < result.compute_ns <= result.ended_ns - before
    assert (result.h2d_bytes, result.d2h_bytes, result.stall_ns) == (0, 0, 0)


@pytest.mark.parametrize(("attention", "value"), [("reference", float("inf")), ("auto", float("nan"))])
def test_a_row_whose_logits_are_not_finite_leaves_the_others_exact(attention: str, value: float) -> None:
    """Long and short contexts and a prefill beside it: of each step the tokens are those of a batch without the row. What it
    left in its blocks is not read by who gets them next."""
    driver = Driver(tiny_model("llama", attention=attention))
    for slot, length in ((0, 12), (1, 70), (2, 11)):
        driver.step(driver.prompt_row(slot, random_tokens(length, slot)))
    driver.worker.tensors.gpu[:, driver.tables[0][0]] = value
    row, prompt = driver.decode_row(0), driver.prompt_row(3, random_tokens(9, 3))
    result = driver.perform([row, driver.decode_row(1), driver.decode_row(2), prompt], driver.allocate(3, 9))
    assert (result.error, result.not_finite, sorted(result.tokens)) == (None, (0,), [1, 2, 3])
    assert set(result.margins) == set(result.tokens)
    for slot, token in result.tokens.items():
        driver.tokens[slot].append(token)
        driver.check_logits(slot)
    driver.free += [block for block in driver.tables.pop(0) if block is not None]
    driver.step(driver.prompt_row(4, random_tokens(13, 4)))
    driver.step(driver.decode_row(4), driver.decode_row(1))
    driver.check_logits(4)
    driver.check_logits(1)
