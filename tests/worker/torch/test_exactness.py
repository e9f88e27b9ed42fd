"""Greedy tokens and logits equal transformers' own, wherever the KV of the history was in the meantime.

Every block holds NaN until it is written, so a single key too many turns the logits to NaN.
"""

from __future__ import annotations

import pytest

from pensieve.core.plan import Moved, swap_in, swap_out
from pensieve.device.model import LoadedModel

from .driver import Driver, converse, plain_generate, plain_logits, random_tokens


@pytest.mark.parametrize("scatter", [True, False])
def test_turns_of_one_conversation(model: LoadedModel, scatter: bool) -> None:
    converse(model, Driver(model, scatter=scatter), [(37, 9), (1, 4), (21, 12)])


def test_ragged_batch(model: LoadedModel) -> None:
    """Prefill, append and decode of six conversations in the same forwards; contexts from 1 to over 200 tokens."""
    driver = Driver(model, gpu_blocks=160)
    lengths = [3, 45, 1, 190, 101, 44]
    for slot, length in enumerate(lengths):
        rows = [driver.prompt_row(slot, random_tokens(length, slot))]
        rows += [driver.decode_row(other) for other in range(slot)]
        driver.step(*rows)
        driver.keep_logits(*range(slot + 1))
    driver.step(*[driver.decode_row(slot) for slot in range(len(lengths))])
    rows = [driver.prompt_row(0, random_tokens(30, 10)), driver.prompt_row(3, random_tokens(2, 11))]
    driver.step(*rows, *[driver.decode_row(slot) for slot in (1, 2, 4, 5)])
    driver.keep_logits(*range(len(lengths)))
    driver.check_kept()
    for slot in range(len(lengths)):
        written = len(driver.tokens[slot]) - (30 if slot == 0 else 2 if slot == 3 else 0)
        assert written > lengths[slot]
        expected = plain_logits(model, driver.tokens[slot][:-1]).argmax(dim=-1)
        assert expected[-1] == driver.tokens[slot][-1]


def test_through_the_cpu_tier(model: LoadedModel) -> None:
    """All chunks leave for the CPU, their blocks are poisoned, and they return into other blocks with the next turn."""
    driver = Driver(model)
    driver.step(driver.prompt_row(0, random_tokens(50, 1)))
    driver.step(driver.decode_row(0))
    old = [block for block in driver.tables[0] if block is not None]
    homes = list(range(len(old)))[::-1]
    result = driver.perform(
        moves=[swap_out(5, tuple(old[:3]), tuple(homes[:3])), swap_out(6, tuple(old[3:]), tuple(homes[3:]))]
    )
    assert sorted(result.moved) == [Moved(5), Moved(6)]
    assert result.d2h_bytes == len(old) * driver.worker.tensors.block_bytes
    for chunk in range(len(old)):
        driver.release(0, chunk)
    row = driver.prompt_row(0, random_tokens(20, 2))
    deltas = driver.allocate(0, len(driver.tokens[0]))
    new = [block for _, _, (block,) in deltas[: len(old)]]
    assert not set(new) & set(old)
    result = driver.perform([row], deltas, moves=[swap_in(7, tuple(homes), tuple(new))])
    assert result.moved == (Moved(7),)
    assert result.h2d_bytes == len(old) * driver.worker.tensors.block_bytes
    driver.tokens[0].append(result.tokens[0])
    driver.check_logits(0)


def _with_two_leading_chunks_and_a_hole_dropped(model: LoadedModel) -> tuple[Driver, int]:
    driver = Driver(model)
    driver.step(driver.prompt_row(0, random_tokens(70, 1)))
    for chunk in (0, 1, 4):
        driver.release(0, chunk)
    start = len(driver.tokens[0]) - 1
    driver.tokens[0].extend(random_tokens(100, 2))
    return driver, start


def test_recovery_in_one_forward(model: LoadedModel) -> None:
    """Section 4.3.4: two leading chunks and a hole recomputed together with 100 new tokens."""
    driver, start = _with_two_leading_chunks_and_a_hole_dropped(model)
    driver.step(driver.row(0, ((0, 16), (32, 40), (start, len(driver.tokens[0])))))
    driver.check_logits(0)
    driver.step(driver.decode_row(0))
    driver.check_logits(0)


def test_recovery_under_a_budget(model: LoadedModel) -> None:
    """The same work in ascending order, 48 positions a plan, with another conversation decoding beside it."""
    driver, start = _with_two_leading_chunks_and_a_hole_dropped(model)
    driver.step(driver.prompt_row(1, random_tokens(60, 3)))
    stop = len(driver.tokens[0])
    pieces = [
        ((0, 16), (32, 40), (start, start + 24)),
        ((start + 24, start + 72),),
        ((start + 72, stop),),
    ]
    for index, runs in enumerate(pieces):
        assert sum(b - a for a, b in runs) <= 48
        driver.step(driver.row(0, runs, sample=index == len(pieces) - 1), driver.decode_row(1))
        driver.keep_logits(1)
    driver.keep_logits(0)
    driver.check_kept()


def test_chunked_prefill_inside_a_chunk(model: LoadedModel) -> None:
    """Pieces that start and end inside chunks, one of a single token."""
    driver = Driver(model)
    driver.tokens[0] = random_tokens(61, 4)
    for start, stop in ((0, 13), (13, 14), (14, 43), (43, 61)):
        driver.step(driver.row(0, ((start, stop),), sample=stop == 61))
    driver.check_logits(0)
    assert driver.tokens[0][-1:].tolist() == plain_generate(model, driver.tokens[0][:-1], 1)


def test_a_window_reads_nothing_below_it(model_of) -> None:  # type: ignore[no-untyped-def]
    """Mistral's layers are all windowed (20): chunks wholly below the window may be gone."""
    model = model_of("mistral")
    driver = Driver(model)
    driver.step(driver.prompt_row(0, random_tokens(60, 1)))
    for chunk in range(3):  # positions 0-23; the next query is 60 and sees 41-60
        block = driver.tables[0][chunk]
        driver.worker.tensors.gpu[:, block] = float("nan")
    driver.step(driver.decode_row(0))
    driver.check_logits(0)
