"""A conversation on a tiny model with attention_backend=triton, in the interpreter: the plain model's tokens."""

from __future__ import annotations

import pytest

from pensieve.device.asked import ModelAsked
from pensieve.device.model import LoadedModel, load_model

from ..driver import Driver, plain_generate, random_tokens, tiny_spec

CHUNK = 8


def _model(name: str) -> LoadedModel:
    return load_model(ModelAsked(tiny_spec(name), threads=1, attention="triton", chunk_tokens=CHUNK))


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_tokens_of_two_turns_and_a_recovery_equal_the_plain_models(name: str) -> None:
    """The second turn's history lost two chunks, so three runs are computed in one forward. Gemma 2: window and softcap."""
    model = _model(name)
    assert (model.attention.name, model.attention_note) == ("triton", "")
    driver = Driver(model, chunk=CHUNK)
    assert driver.worker.settings()["attention_backend"] == "triton"
    assert driver.worker.settings()["attention_version"] == model.attention.version
    driver.step(driver.prompt_row(0, random_tokens(29, 1)), driver.prompt_row(1, random_tokens(3, 2)))
    for _ in range(2):
        driver.step(driver.decode_row(0), driver.decode_row(1))
    first = list(driver.tokens[0])
    assert first[29:] == plain_generate(model, first[:29], 3)

    for chunk in (0, 2):
        driver.release(0, chunk)
    driver.tokens[0].extend(random_tokens(6, 3))
    known = len(driver.tokens[0])
    driver.step(driver.row(0, ((0, 8), (16, 24), (len(first) - 1, known))), driver.decode_row(1))
    driver.check_logits(0)
    driver.step(driver.decode_row(0))
    assert list(driver.tokens[0][known:]) == plain_generate(model, list(driver.tokens[0][:known]), 2)
