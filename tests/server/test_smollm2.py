"""A real model answers, from whichever tier its history comes, with the tokens of transformers' generate on its messages."""

import pytest

from pensieve import create_server
from pensieve.errors import EngineMissing, WeightsMissing
from pensieve.lab.compose.model_files import check_gguf, find_gguf, model_config, own_folder

MODEL = "smollm2_135m_gguf"
FRANCE, ITALY = "What is the capital of France?", "And what is the capital of Italy?"
OTHERS = (
    "Tell me about the river, the bridges, the museums and the long history of this city, its people and its food. "
)


@pytest.fixture(scope="module")
def folder():
    try:
        check_gguf(find_gguf(str(model_config(MODEL).gguf_file)))
    except (WeightsMissing, EngineMissing) as error:
        pytest.skip(str(error))
    made = own_folder(model_config(MODEL))
    assert made is not None
    return made


@pytest.fixture(scope="module")
def server(folder):
    with create_server(model=MODEL, gpu_cache="384 tokens", cpu_cache="384 tokens", device="cpu") as one:
        yield one


@pytest.fixture(scope="module")
def expected(folder):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    messages = []
    replies = []
    for asked in (FRANCE, ITALY):
        messages.append({"role": "user", "content": asked})
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        replies.append(model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :].tolist())
        messages.append({"role": "assistant", "content": tokenizer.decode(replies[-1], skip_special_tokens=True)})
    return replies


@pytest.mark.slow
@pytest.mark.parametrize(("tier", "others"), [("gpu", 0), ("cpu", 2), ("recomputed", 5)])
def test_it_answers_the_same_from_every_tier(server, expected, tier, others):
    server.forget()
    first = server.generate(tier, text=FRANCE, max_new_tokens=16)
    for number in range(others):  # conversations that need its place
        server.generate(f"other {number}", text=OTHERS * 6, max_new_tokens=1)
    second = server.generate(tier, text=ITALY, max_new_tokens=16)
    assert first.text == "The capital of France is Paris."
    assert second.text == "The capital of Italy is Rome."
    assert [first.token_ids, second.token_ids] == expected
    turn = second.turn
    assert turn.history_tokens == first.turn.prompt_tokens + len(first.token_ids) - 1
    found = {"gpu": turn.gpu_hit_tokens, "cpu": turn.cpu_hit_tokens, "recomputed": turn.recomputed_tokens}
    assert found[tier] > turn.history_tokens // 2, found
