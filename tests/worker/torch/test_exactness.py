"""Greedy tokens and logits equal transformers' own, wherever the KV of the history was in the meantime.

Every block holds NaN until it is written, so a single key too many turns the logits to NaN.
"""

from __future__ import annotations

from .driver import Driver, plain_generate, plain_logits, random_tokens


def test_ragged_batch(model):
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


def test_chunked_prefill_inside_a_chunk(model):
    """Pieces that start and end inside chunks, one of a single token."""
    driver = Driver(model)
    driver.tokens[0] = random_tokens(61, 4)
    for start, stop in ((0, 13), (13, 14), (14, 43), (43, 61)):
        driver.step(driver.row(0, ((start, stop),), sample=stop == 61))
    driver.check_logits(0)
    assert driver.tokens[0][-1:].tolist() == plain_generate(model, driver.tokens[0][:-1], 1)


def test_a_window_reads_nothing_below_it(model_of):
    """Mistral's layers are all windowed (20): chunks wholly below the window may be gone."""
    model = model_of("mistral")
    driver = Driver(model)
    driver.step(driver.prompt_row(0, random_tokens(60, 1)))
    for chunk in range(3):  # positions 0-23; the next query is 60 and sees 41-60
        block = driver.tables[0][chunk]
        driver.worker.tensors.gpu[:, block] = float("nan")
    driver.step(driver.decode_row(0))
    driver.check_logits(0)
