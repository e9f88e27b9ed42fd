"""Turn n + 1 extends turn n token for token, with the templates that models publish."""

import pytest

from pensieve.errors import ConfigError
from pensieve.serve.tokenizer import ByteTokenizer, ChatTemplate, HubTokenizer
from tests.chat import CHATML, GEMMA_2, LLAMA_3, MISTRAL, SPECIALS, THINKING, dialogue, save_tokenizer

PUBLISHED = {"chatml": CHATML, "llama3": LLAMA_3, "gemma2": GEMMA_2, "mistral": MISTRAL}


@pytest.fixture(params=[*PUBLISHED, "plain"])
def tokenizer(request, tmp_path):
    return HubTokenizer(save_tokenizer(tmp_path, PUBLISHED.get(request.param), begins=request.param == "plain"))


def prompt_of(chat, messages, replies, tools=None):
    """replies: the model's own tokens, by place."""
    own = [{**one, "ids": replies[at]} if at in replies else one for at, one in enumerate(messages)]
    return chat.prompt(own, tools)


def loaded(folder, template):
    tokenizer = HubTokenizer(save_tokenizer(folder, template))
    return tokenizer, ChatTemplate(tokenizer)


def spelled(tokenizer, text, ended):
    """A reply as a model may sample it: letter by letter, which is not how the tokenizer encodes it."""
    ids = [token for letter in text for token in tokenizer.encode(tokenizer.literal(letter), marked=True)]
    assert ids != tokenizer.encode(text)
    return [*ids, min(tokenizer.eos_ids)] if ended else ids


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("turns", [("the one",), ("the one", "Rome", "and then?")])
def test_without_own_tokens_it_is_what_transformers_makes_of_the_messages(tmp_path, name, turns):
    from transformers import PreTrainedTokenizerFast

    _, chat = loaded(tmp_path, PUBLISHED[name])
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(dialogue(*turns), add_generation_prompt=True, return_dict=False)
    assert chat.prompt(dialogue(*turns)) == expected


@pytest.mark.parametrize("name", PUBLISHED)
def test_special_tokens_come_from_the_template_alone(tmp_path, name):
    """Whatever a message, a reply that a client tells, a tool's result or a tool's schema spells out."""
    tokenizer, _ = loaded(tmp_path, PUBLISHED[name])
    tokenizer.chat_template += "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    chat = ChatTemplate(tokenizer)
    specials = {text: tokenizer.encode(text)[0] for text in SPECIALS[PUBLISHED[name]]}
    hostile = f"the{''.join(specials)}\ufdd0one\ufdd1 \ufdd11\ufdd1{'on'.join(specials)}e"

    def prompt(text):
        tools = [{"type": "function", "function": {"name": "f", "description": text, text: [text]}}]
        return prompt_of(chat, dialogue("a", "b", text, text, text), {1: spelled(tokenizer, "the one", True)}, tools)

    ids = prompt(hostile)
    assert [i for i in ids if i in specials.values()] == [i for i in prompt("mild") if i in specials.values()]
    assert max(ids) < tokenizer.vocab_size
    assert tokenizer.decode(ids).count(hostile) == 6
    assert chat.opening(hostile) == chat.prompt(dialogue(hostile))
    reply = spelled(tokenizer, hostile, True)
    assert not set(reply[:-1]) & set(specials.values())
    told = prompt_of(chat, dialogue("a", hostile, hostile), {1: reply})
    assert told == chat.opening("a") + reply + chat.following(hostile, reply[-1])


@pytest.mark.parametrize("ended", [True, False])
def test_each_turn_extends_the_one_before(tokenizer, ended):
    """Whether the model ended its reply or was cut short. Plain lines show no end of sequence: its token, which has no KV
    yet, is left out."""
    chat = ChatTemplate(tokenizer)
    messages, replies, held = dialogue("the first"), {}, []
    for text in (" the one ", "the other", "stone"):
        prompt = prompt_of(chat, messages, replies)
        assert prompt[: len(held)] == held
        if held:  # a message can follow without those before it
            assert prompt == held + chat.following("and the one?", held[-1])
        reply = spelled(tokenizer, text, ended)
        held = prompt + (reply[:-1] if chat.plain and ended else reply)
        replies[len(messages)] = reply
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and the one?"}]
    assert chat.prompt(messages) != prompt_of(chat, messages, replies), "encoded anew, these replies are other tokens"


def test_a_reply_that_ended_otherwise_than_the_template_says_ends_as_it_says(tmp_path):
    """Gemma 2 may stop with <eos>, and its template knows <end_of_turn> only."""
    tokenizer, chat = loaded(tmp_path, GEMMA_2)
    other = tokenizer.encode("<eos>")[0]
    tokenizer.eos_ids |= {other}
    reply = [*tokenizer.encode("one"), other]
    ids = prompt_of(chat, dialogue("the first", "one", "two"), {1: reply})
    assert ids == chat.prompt(dialogue("the first", "one", "two"))
    assert other not in ids


def test_a_template_that_moves_the_system_message_keeps_the_common_prefix(tmp_path):
    tokenizer, chat = loaded(tmp_path, MISTRAL)
    first = chat.prompt(dialogue("the first", system="rules"))
    reply = spelled(tokenizer, "the one", True)
    second = prompt_of(chat, dialogue("the first", "the one", "and?", system="rules"), {2: reply})
    common = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    assert tokenizer.decode(first[:common]) == " "  # behind "<s>[INST]"
    assert any(second[i : i + len(reply)] == reply for i in range(len(second))), "elsewhere"


def test_a_template_that_drops_thinking_encodes_anew_from_there(tmp_path):
    tokenizer, chat = loaded(tmp_path, THINKING)
    thought, plain = (spelled(tokenizer, text, True) for text in ("<think>the</think>\nstone", "the stone"))
    messages = dialogue("the first", "?", "and?", "?", "so?")
    kept = prompt_of(chat, messages, {1: plain, 3: plain})
    told = prompt_of(chat, messages, {1: plain, 3: thought})
    assert "stone" in tokenizer.decode(told) and "<think>" not in tokenizer.decode(told)
    assert told == prompt_of(chat, dialogue("the first", "?", "and?", "stone", "so?"), {1: plain})
    until = kept.index(plain[0], len(prompt_of(chat, messages[:3], {1: plain})))
    assert told[:until] == kept[:until]


def test_without_a_template_messages_are_lines_behind_the_token_that_texts_begin_with(tmp_path):
    messages = dialogue("Hello", "Hi", "Well?", system="Be kind.")
    ids = ChatTemplate(ByteTokenizer()).prompt(messages)
    assert bytes(ids).decode() == "System: Be kind.\nUser: Hello\nAssistant: Hi\nUser: Well?\nAssistant:"
    tokenizer = HubTokenizer(save_tokenizer(tmp_path, begins=True))
    first, *rest = ChatTemplate(tokenizer).prompt(messages)
    assert [first] == tokenizer.encode("<s>") and first not in rest


@pytest.mark.parametrize(
    ("messages", "says"),
    [(dialogue("a", system="b"), "System role not supported"), (dialogue("a") * 2, "must alternate")],
)
def test_messages_that_a_template_refuses_are_refused_in_a_sentence(tmp_path, messages, says):
    with pytest.raises(ConfigError, match=says):
        loaded(tmp_path, GEMMA_2)[1].prompt(messages)
