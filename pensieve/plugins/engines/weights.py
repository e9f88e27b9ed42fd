"""The very weights that our engine runs, in the form that another engine reads; written once and kept in the user's cache.

In a GGUF file tensor names and metadata keys are llama.cpp's, by its package gguf. Prompts and replies travel as token ids,
so the file names each id by a plain ASCII word instead of carrying the model's vocabulary: llama.cpp holds back a streamed
token whose text ends inside a UTF-8 character, which would show as a late first token.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from pensieve.device.asked import ModelAsked
from pensieve.errors import UnsupportedModel
from pensieve.hub import user_cache
from pensieve.lab.results.identity import content_hash, text_hash
from pensieve.plugins.engines.base import EngineSetup


def plain_module(setup: EngineSetup) -> Any:
    """A transformers module on its own attention (sdpa), loaded as our engine loads it. Raises what load_module raises."""
    import torch

    from pensieve.device.weights import load_module

    torch.set_num_threads(setup.threads)
    asked = ModelAsked(setup.model, setup.weights, setup.hub_id, setup.revision, setup.seed)
    module = load_module(asked, torch.device(setup.device))
    module.set_attn_implementation("sdpa")
    return module


def gguf_file(setup: EngineSetup, file_type: str) -> Path:
    """The weights as GGUF. file_type: of matrices, f32 or f16; norms, biases and positions are always f32."""

    def write(folder: Path) -> None:
        folder.mkdir()
        _write_gguf(plain_module(setup), setup.model.name, folder / "model.gguf", file_type)

    return _kept(f"gguf-{file_type}-{_key(setup)}", write) / "model.gguf"


def model_folder(setup: EngineSetup) -> Path:
    """The weights as save_pretrained writes them; the user's own folder where they come from one."""
    if setup.weights not in ("random", "hub"):
        return Path(setup.weights).expanduser().resolve()

    def write(folder: Path) -> None:
        from pensieve.device.weights import quiet_transformers

        with quiet_transformers():
            plain_module(setup).save_pretrained(folder, safe_serialization=True)

    return _kept(f"folder-{_key(setup)}", write)


def _kept(name: str, write: Callable[[Path], None]) -> Path:
    """A folder that one process writes and that is whole where it is there."""
    folder = user_cache() / "weights" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{name}.lock")):
        if not folder.is_dir():
            partial = folder.with_name(f".{name}.{os.getpid()}")
            shutil.rmtree(partial, ignore_errors=True)
            write(partial)
            partial.rename(folder)
    return folder


def _key(setup: EngineSetup) -> str:
    """Names these weights by all that they depend on; random ones also by the version of torch that draws them."""
    facts: dict[str, Any] = {
        "architecture": dict(setup.model.architecture),
        "dtype": setup.model.dtype,
        "weights": setup.weights,
        "export": content_hash(Path(__file__)),
    }
    if setup.weights == "random":
        import torch

        facts |= {"seed": setup.seed, "torch": torch.__version__, "device": setup.device.partition(":")[0]}
        facts["drawn_by"] = content_hash(Path(__file__).parents[2] / "device" / "model.py")
    elif setup.weights == "hub":
        facts |= {"hub_id": setup.hub_id, "revision": setup.revision}
    else:
        facts["weights"] = content_hash(Path(setup.weights).expanduser())
    return text_hash(json.dumps(facts, sort_keys=True, default=str))[:24]


# -- GGUF -------------------------------------------------------------------------------------------------------------------

HEADERS = {
    "llama": {
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers",
        "feed_forward_length": "intermediate_size",
        "head_count": "num_attention_heads",
        "head_count_kv": "num_key_value_heads",
        "layer_norm_rms_eps": "rms_norm_eps",
    },
    "gpt2": {
        "context_length": "n_positions",
        "embedding_length": "n_embd",
        "block_count": "n_layer",
        "head_count": "n_head",
        "layer_norm_eps": "layer_norm_epsilon",
    },
}
"""By transformers' model_type, which is llama.cpp's name too: keys of the file, and the fields of a configuration."""

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
    rope = architecture.get("rope_parameters") or architecture.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    reasons = {
        f"this is {family}": family not in HEADERS,
        f"this scales its rotary positions ({kind})": kind != "default",
        **{f"this has {field}": bool(architecture.get(field)) for field in ("attention_bias", "mlp_bias")},
    }
    if reason := next((said for said, holds in reasons.items() if holds), None):
        raise UnsupportedModel(
            f"llama.cpp gets model={name} from its weights, which are exported for the families {', '.join(HEADERS)} without "
            f"biases and with plain rotary positions, and {reason}; choose another model or another baseline."
        )


def _write_gguf(module: Any, name: str, file: Path, file_type: str) -> None:
    """Raises UnsupportedModel."""
    import gguf

    config = module.config
    refuse_family(name, config.to_dict())
    family = str(config.model_type)
    writer = gguf.GGUFWriter(file, family)
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if file_type == "f32" else gguf.LlamaFileType.MOSTLY_F16)
    writer.add_vocab_size(config.vocab_size)
    for key, field in HEADERS[family].items():
        getattr(writer, f"add_{key}")(getattr(config, field))
    if family == "llama":
        rope = getattr(config, "rope_parameters", None) or {}
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
        writer.add_rope_freq_base(float(rope.get("rope_theta", getattr(config, "rope_theta", 10_000.0))))
    else:
        writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
    writer.add_tokenizer_model("rwkv")  # the one that has no end of sequence unless the file names one
    writer.add_token_list([word(token) for token in range(config.vocab_size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    writer.add_add_bos_token(False)
    for tensor, values in _tensors(module, family):
        narrow = file_type == "f16" and values.ndim > 1 and not tensor.startswith("position_embd")
        writer.add_tensor(tensor, values.astype("float16" if narrow else "float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
