"""Chat templates as models publish them, and a byte-level tokenizer that has their special tokens."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

CHATML = (  # HuggingFaceTB/SmolLM2-135M-Instruct
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a "
    "helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_3 = (  # meta-llama/Meta-Llama-3-8B-Instruct
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA_2 = (  # google/gemma-2-27b-it
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception("
    "'Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if (message['role'] == "
    "'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role "
    "+ '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{'<start_of_turn>model\n'}}{% endif %}"
)
MISTRAL = (  # mistralai/Mistral-7B-Instruct-v0.3, without tools
    '{%- if messages[0]["role"] == "system" %}{%- set system_message = messages[0]["content"] %}{%- set loop_messages = '
    "messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}{{- bos_token }}{%- for message in "
    'loop_messages %}{%- if message["role"] == "user" %}{%- if loop.last and system_message is defined %}{{- "[INST] " + '
    'system_message + "\n\n" + message["content"] + "[/INST]" }}{%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}'
    '{%- endif %}{%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token}}{%- else %}'
    '{{- raise_exception("Only user and assistant roles are supported!") }}{%- endif %}{%- endfor %}'
)
THINKING = (  # how Qwen3 shows history: what an earlier reply thought is dropped
    "{%- for message in messages %}{%- set content = message.content %}{%- if message.role == 'assistant' and '</think>' in "
    "content %}{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}{{- '<|im_start|>' + message.role "
    "+ '\n' + content + '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- endif %}"
)

SPECIALS = {  # template: bos, eos, and the rest of the markup
    CHATML: ("<|im_start|>", "<|im_end|>"),
    LLAMA_3: ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    GEMMA_2: ("<bos>", "<end_of_turn>", "<start_of_turn>", "<eos>"),
    MISTRAL: ("<s>", "</s>", "[INST]", "[/INST]"),
    THINKING: ("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
}

MERGES = [("t", "h"), ("th", "e"), ("o", "n"), ("on", "e")]
"""Few, so that most ids are bytes; enough that a text has more than one encoding, as replies do."""


def save_tokenizer(folder: Path, template: str | None = None, begins: bool = False) -> Path:
    """A tokenizer of at most 274 ids in `folder`. begins: it puts its first special token before a text (BOS)."""
    alphabet = sorted(ByteLevel.alphabet())
    vocab = {piece: number for number, piece in enumerate([*alphabet, *("".join(pair) for pair in MERGES)])}
    backend = Tokenizer(BPE(vocab=vocab, merges=MERGES))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    bos, eos, *rest = SPECIALS[template] if template else ("<s>", "</s>")
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (bos, eos, *rest)])
    if begins:
        backend.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": bos,
        "eos_token": {"__type": "AddedToken", "content": eos},
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def dialogue(*said: str, system: str | None = None) -> list[dict[str, str]]:
    """Messages of user and assistant in turn."""
    roles: Sequence[str] = ("user", "assistant")
    first = [] if system is None else [{"role": "system", "content": system}]
    return first + [{"role": roles[number % 2], "content": text} for number, text in enumerate(said)]
