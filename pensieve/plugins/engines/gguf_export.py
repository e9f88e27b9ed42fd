"""A transformers module as a GGUF file, so that llama.cpp runs the very weights that our engine runs.

Tensor names and metadata keys are llama.cpp's, by its package gguf. Prompts and replies travel as token ids, so the
file names each id by a plain ASCII word instead of carrying the model's vocabulary: llama.cpp holds back a streamed token
whose text ends inside a UTF-8 character, which would show as a late first token.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pensieve.errors import UnsupportedModel

FILE_TYPES = ("f32", "f16")
FAMILIES = ("llama", "gpt2")
"""transformers' model_type, which is the architecture's name in llama.cpp too."""

_WORD = re.compile(r"<(\d+)>")


def word(token: int) -> str:
    """What a token is called in the file: no word begins or ends another, so text can be read back token by token."""
    return f"<{token}>"


def tokens_in(text: str) -> list[int]:
    """The tokens whose words make up `text`."""
    return [int(found) for found in _WORD.findall(text)]


def refuse_family(name: str, architecture: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel, in one sentence, for a model that cannot be written as GGUF. Nothing is loaded for it."""
    family = str(architecture.get("model_type"))
    if family not in FAMILIES:
        raise UnsupportedModel(
            f"llama.cpp gets model={name} from its weights, which are exported for the families {', '.join(FAMILIES)}, "
            f"and this is {family}; choose another model or another baseline."
        )
    rope = architecture.get("rope_parameters") or architecture.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        raise UnsupportedModel(
            f"model={name} scales its rotary positions ({kind}), which the export to GGUF does not write; choose another "
            "model or baseline."
        )
    for field in ("attention_bias", "mlp_bias"):
        if architecture.get(field):
            raise UnsupportedModel(
                f"model={name} has {field}, which llama.cpp's llama architecture does not; choose another model or baseline."
            )


def write_gguf(module: Any, name: str, file: Path, file_type: str) -> None:
    """Write the module's weights to `file`, which appears when it is whole. file_type: of matrices, f32 or f16; norms,
    biases and positions are always f32. Raises UnsupportedModel."""
    import gguf

    assert file_type in FILE_TYPES, file_type
    config = module.config
    refuse_family(name, config.to_dict())
    family = str(config.model_type)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    writer = gguf.GGUFWriter(partial, family)
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if file_type == "f32" else gguf.LlamaFileType.MOSTLY_F16)
    (_llama_header if family == "llama" else _gpt2_header)(writer, config)
    _vocabulary(writer, gguf, config.vocab_size)
    for tensor, values in _tensors(module, family):
        narrow = file_type == "f16" and values.ndim > 1 and not tensor.startswith("position_embd")
        writer.add_tensor(tensor, values.astype("float16" if narrow else "float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(file)


def _llama_header(writer: Any, config: Any) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(rope.get("rope_theta", getattr(config, "rope_theta", 10_000.0))))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _gpt2_header(writer: Any, config: Any) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)


def _vocabulary(writer: Any, gguf: Any, size: int) -> None:
    """`rwkv` is the tokenizer that has no end of sequence unless the file names one."""
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list([word(token) for token in range(size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_add_bos_token(False)


def _tensors(module: Any, family: str) -> Iterator[tuple[str, Any]]:
    """GGUF's names and values. A tied output is left out, as llama.cpp expects."""
    import gguf

    config = module.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], config.num_hidden_layers)
    for name, tensor in module.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new is not None, f"llama.cpp has no name for {name}"
        values = tensor.detach().to("cpu").float().numpy()
        if family == "llama" and new.endswith(("attn_q.weight", "attn_k.weight")):
            heads = config.num_attention_heads if "attn_q" in new else config.num_key_value_heads
            values = _interleaved(values, heads)
        if family == "gpt2" and new.startswith("blk.") and values.ndim == 2:
            values = values.T  # a Conv1D of transformers holds [in, out]
        yield new, values


def _interleaved(values: Any, heads: int) -> Any:
    """[heads × head_dim, hidden] with each head's rows in the order in which llama.cpp pairs them for rotation: 0, half, 1,
    half + 1, ... where transformers pairs row i with row i + half."""
    rows = values.shape[0] // heads
    return values.reshape(heads, 2, rows // 2, -1).swapaxes(1, 2).reshape(values.shape)
