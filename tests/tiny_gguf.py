"""A GGUF file of a few hundred kilobytes, written with the gguf package: a Llama with all its tensors and its tokenizer."""

from pathlib import Path

import numpy as np

from tests.chat import CHATML, MERGES, SPECIALS

LAYERS, HIDDEN, HEADS, KV_HEADS, INNER = 2, 64, 4, 2, 96


def write_gguf(path: Path, seed: int = 0, without: str = "") -> Path:
    """F32 and Q8_0 tensors of fixed random numbers; a byte-level tokenizer with the template ChatML. without: a tensor
    that is left out."""
    import gguf
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*sorted(ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    specials = SPECIALS[CHATML]
    vocab = [*tokens, *specials]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(vocab))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocab)
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_token_types([*([normal] * len(tokens)), *([control] * len(specials))])
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(len(tokens))
    writer.add_eos_token_id(len(tokens) + 1)
    writer.add_chat_template(CHATML)
    random = np.random.default_rng(seed)

    def tensor(name: str, *shape: int, quantised: bool = False) -> None:
        if name == without:
            return
        values = random.standard_normal(shape, dtype=np.float32) * (1.5 / shape[-1] ** 0.5)
        if quantised:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values if len(shape) > 1 else np.ones(shape, np.float32))

    kv = HIDDEN // HEADS * KV_HEADS
    tensor("token_embd.weight", len(vocab), HIDDEN)
    tensor("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        for name, rows, columns in (
            ("attn_q", HIDDEN, HIDDEN),
            ("attn_k", kv, HIDDEN),
            ("attn_v", kv, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN),
            ("ffn_gate", INNER, HIDDEN),
            ("ffn_up", INNER, HIDDEN),
            ("ffn_down", HIDDEN, INNER),
        ):
            tensor(f"blk.{layer}.{name}.weight", rows, columns, quantised=True)
        tensor(f"blk.{layer}.attn_norm.weight", HIDDEN)
        tensor(f"blk.{layer}.ffn_norm.weight", HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
