from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from pensieve.core.plan import Moved
from pensieve.device.attention import Iteration, attending, paged_attention
from pensieve.device.model import LoadedModel
from pensieve.errors import UnsupportedModel
from pensieve.serve.systems.profiling import swap_out

from .driver import Driver, random_tokens, tiny_model
from .kernels.cases import Heads, make_case


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


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("attention", ["reference", "auto"])
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


def test_a_window_reads_nothing_below_it(model_of: Callable[..., LoadedModel]) -> None:
    """Mistral's layers are all windowed (20): chunks wholly below the window may be gone."""
    driver = Driver(model_of("mistral"))
    driver.step(driver.prompt_row(0, random_tokens(60, 1)))
    for chunk in range(3):  # positions 0-23; the next query is 60 and sees 41-60
        driver.worker.tensors.gpu[:, driver.tables[0][chunk]] = float("nan")
    driver.step(driver.decode_row(0))
    driver.check_logits(0)


def test_every_layer_waits_before_its_kv_is_touched_and_a_failed_forward_leaves_no_iteration_behind() -> None:
    batch, pool = make_case([[(0, 3)]], Heads(4, 2, 8), chunk=4).batch, torch.zeros(2, 1600, 2, 2, 8)
    q, k = torch.ones(1, 4, 3, 8), torch.ones(1, 2, 3, 8)
    waited: list[int] = []

    def wait(layer: int) -> None:
        assert not pool[layer].any()
        waited.append(layer)

    def attend(layer: int) -> None:
        paged_attention(SimpleNamespace(layer_idx=layer), q, k, k, None)

    def fail() -> None:
        with attending(Iteration(batch, pool, 4, wait)):
            attend(0)
            attend(1)
            raise RuntimeError("x")

    with pytest.raises(RuntimeError):
        fail()
    assert waited == [0, 1] and pool.sum() == 2 * 3 * 2 * 2 * 8
    with pytest.raises(LookupError):
        attend(0)
    with pytest.raises(UnsupportedModel, match="s_aux"):
        paged_attention(SimpleNamespace(layer_idx=0), q, k, k, None, s_aux=torch.zeros(2))
