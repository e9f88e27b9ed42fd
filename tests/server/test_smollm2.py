"""A real model answers, from whichever tier its history comes, with the tokens of transformers' generate on its messages."""

import pytest

from pensieve import create_server
from pensieve.errors import EngineMissing, WeightsMissing
from pensieve.lab.compose.model_files import check_gguf, find_gguf, model_config

MODEL = "smollm2_135m_gguf"
FRANCE, ITALY = "What is the capital of France?", "And what is the capital of Italy?"
EXPECTED = [[504, 3575, 282, 4649, 314, 7042, 30, 2], [504, 3575, 282, 7158, 314, 7268, 30, 2]]
"""Of `generate` of transformers 5.24 in float32, greedily, on the messages in the model's own template (2026-11-28)."""
OTHERS = (
    "Tell me about the river, the bridges, the museums and the long history of this city, its people and its food. "
)


@pytest.fixture(scope="module")
def server():
    try:
        check_gguf(find_gguf(str(model_config(MODEL).gguf_file)))
    except (WeightsMissing, EngineMissing) as error:
        pytest.skip(str(error))
    with create_server(model=MODEL, gpu_cache="384 tokens", cpu_cache="384 tokens", device="cpu") as one:
        yield one


@pytest.mark.slow
@pytest.mark.parametrize(("tier", "others"), [("gpu", 0), ("cpu", 2), ("recomputed", 5)])
def test_it_answers_the_same_from_every_tier(server, tier, others):
    server.forget()
    first = server.generate(tier, text=FRANCE, max_new_tokens=16)
    for number in range(others):  # conversations that need its place
        server.generate(f"other {number}", text=OTHERS * 6, max_new_tokens=1)
    second = server.generate(tier, text=ITALY, max_new_tokens=16)
    assert first.text == "The capital of France is Paris."
    assert second.text == "The capital of Italy is Rome."
    assert [first.token_ids, second.token_ids] == EXPECTED
    turn = second.turn
    assert turn.history_tokens == first.turn.prompt_tokens + len(first.token_ids) - 1
    found = {"gpu": turn.gpu_hit_tokens, "cpu": turn.cpu_hit_tokens, "recomputed": turn.recomputed_tokens}
    assert found[tier] > turn.history_tokens // 2, found
