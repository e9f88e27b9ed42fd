"""From a model's spec to transformers' module: its weights drawn at random, or read from the hub, a folder or a GGUF file."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from pensieve.device.asked import ModelAsked
from pensieve.device.attention import IMPLEMENTATION, register
from pensieve.device.sharding import RankGroup
from pensieve.errors import PensieveError, UnsupportedModel, WeightsMissing
from pensieve.hub import first_line, why_not
from pensieve.specs import ModelSpec
from pensieve.units import format_bytes

# Run through the plug without an error, or seem to, and are wrong: attention with sinks, chunked attention, latent KV.
_REFUSED_TYPES = {"gpt_oss", "llama4", "llama4_text", "deepseek_v2", "deepseek_v3"}
# Their angles depend on the longest context in the batch, so a token's K would depend on its company.
_REFUSED_ROPES = ("dynamic", "longrope")
# Spread of random weights times sqrt(hidden). At transformers' 0.02 the blocks hardly move the residual stream, and greedy
# decoding of a small random model repeats one token; at 1.5 it writes varied (meaningless) text.
_RANDOM_GAIN = 1.5
# Where the head is the embedding, a token's own row in the residual stream votes for that token again; Gemma 2, which
# multiplies it by sqrt(hidden), then repeats one token for ever. So the row is made small beside what the blocks add.
_TIED_SHARE = 0.5
_QUICK = 10_000_000  # parameters of a module that is made within a second
_NAMED = 5  # tensors in an error; a folder may lack hundreds


def load_module(asked: ModelAsked, device: torch.device, ranks: RankGroup | None = None) -> Any:
    """transformers' module, not checked against itself. ranks: only this process's part. Raises WeightsMissing,
    UnsupportedModel."""
    register()
    with quiet_transformers():
        if asked.weights == "random":
            module = _random(asked.spec, getattr(torch, asked.spec.dtype), device, asked.seed, ranks)
        else:
            read = partial(_pretrained, asked, device, ranks)
            module = _from_hub(asked, read) if asked.weights == "hub" else _from_folder(asked.weights, read)
        return module.to(device).eval().requires_grad_(False)


def check_sizes(spec: ModelSpec, config: Any) -> None:
    """The KV pools are sized by the spec, so it must describe the loaded model. Raises UnsupportedModel."""
    loaded = ModelSpec.from_architecture(spec.name, config.to_dict(), spec.dtype)
    for field in ("layers", "heads", "kv_heads", "head_dim", "hidden", "vocab"):
        said, has = getattr(spec, field), getattr(loaded, field)
        if said != has:
            raise UnsupportedModel(
                f"Model {spec.name} is configured with {field}={said}, but its weights have {has}; correct the "
                "architecture in its configuration, or choose other weights."
            )


def _check_config(name: str, config: Any) -> None:
    """Raise UnsupportedModel for models that are known to run and give wrong logits; the self-check finds others."""
    if config.model_type in _REFUSED_TYPES:
        raise UnsupportedModel(
            f"Model {name} ({config.model_type}) attends in a way the paged attention does not have; choose a model of "
            "another architecture."
        )
    ropes = json.dumps([getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")], default=str)
    for rope in _REFUSED_ROPES:  # some models have one for each kind of layer
        if f'type": "{rope}"' in ropes:
            raise UnsupportedModel(
                f"Model {name} uses {rope} rotary scaling. Its angles depend on the longest context of a batch, so its KV "
                "cannot be kept. Choose a model without it, or set its rope scaling to linear, yarn or llama3."
            )


def _random(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, seed: int, ranks: RankGroup | None = None
) -> Any:
    """Drawn on the device, in the dtype: a large model never exists twice. The same seed and device give the same weights."""
    if ranks is not None:
        module = ranks.sharded(spec, lambda: _random(spec, dtype, torch.device("cpu"), seed))
        _check_settable(spec.name, module)
        return module
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    architecture = dict(spec.architecture)
    architecture.pop("model_type", None)
    if spec.model_type not in CONFIG_MAPPING:
        raise UnsupportedModel(
            f"model.architecture.model_type={spec.model_type!r} of model {spec.name} is not one that transformers knows, "
            "such as llama, gpt2 or qwen2."
        )
    try:
        config = AutoConfig.for_model(spec.model_type, **architecture)
    except Exception as error:  # its validators raise classes of their own
        raise UnsupportedModel(
            f"model.architecture of model {spec.name} is refused by transformers' {spec.model_type}: "
            f"{' '.join(str(error).split())}"
        ) from error
    spread = _RANDOM_GAIN / spec.hidden**0.5
    setattr(config, "init_std" if hasattr(config, "init_std") else "initializer_range", spread)
    _check_config(spec.name, config)
    check_sizes(spec, config)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        try:
            module = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation="eager", trust_remote_code=False
            )
        except ValueError as error:
            raise UnsupportedModel(f"Model {spec.name} ({spec.model_type}) is not a causal language model.") from error
    if config.tie_word_embeddings:
        embedding = module.get_input_embeddings()
        embedding.weight.data.mul_(_TIED_SHARE / float(getattr(embedding, "embed_scale", 1.0)))
    _check_settable(spec.name, module)
    return module


_Read = Callable[[str, bool], Any]  # of a source, local files only


def _from_folder(path: str, read: _Read) -> Any:
    if not (Path(path) / "config.json").is_file():
        raise WeightsMissing(
            f"model.weights={path} is not a model folder (it has no config.json); give a folder written by "
            "save_pretrained, or set model.weights=random (same speed, meaningless text)."
        )
    try:
        return read(path, True)
    except OSError as error:
        raise WeightsMissing(
            f"{path} holds no safetensors weights that can be read ({first_line(error)}); save the model again with "
            "save_pretrained, or set model.weights=random (same speed, meaningless text)."
        ) from error


def _from_hub(asked: ModelAsked, read: _Read) -> Any:
    """The local cache first; the network only if that lacks it and one short question is answered."""
    hub_id = asked.hub_id
    if hub_id is None:
        raise WeightsMissing(f"Model {asked.spec.name} has no published weights; set model.weights=random or a folder.")
    with suppress(OSError):  # not in the cache, or not wholly
        return read(hub_id, True)
    reason = why_not(hub_id, asked.revision)
    if reason is None:
        try:
            return read(hub_id, False)
        except OSError as error:
            reason = first_line(error)
    raise WeightsMissing(
        f"The weights of {hub_id} cannot be had: {reason}; set model.weights=random (same speed, meaningless text), or "
        "model.weights to a folder written by save_pretrained."
    )


def _pretrained(
    asked: ModelAsked, device: torch.device, ranks: RankGroup | None, source: str, local_files_only: bool
) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM

    spec, revision = asked.spec, asked.revision if asked.weights == "hub" else None
    options: dict[str, Any] = {"revision": revision, "local_files_only": local_files_only, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(source, **options)
        _check_config(spec.name, config)
        check_sizes(spec, config.get_text_config())  # before weights are read, or made for sizes that nobody has
        check_bits(source, spec.parameters, Path(source).glob("*.safetensors"))
        if ranks is not None:
            options |= ranks.options()
        elif device.type != "cpu" and find_spec("accelerate") is not None:
            options["device_map"] = {"": device}  # each tensor goes there when it is read
        with _segments_of_tensors():
            module, report = AutoModelForCausalLM.from_pretrained(
                source,
                config=config,
                dtype=getattr(torch, spec.dtype),
                attn_implementation="eager",
                use_safetensors=True,
                **REPORTED,
                **options,
            )
    except (PensieveError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except SafetensorError as error:
        raise WeightsMissing(
            f"The safetensors files of {source} are damaged ({first_line(error)}); fetch or save the model again."
        ) from error
    except Exception as error:  # malformed files end in any class of error, far from where they are read
        raise UnsupportedModel(
            f"{source} is not a model that transformers can load here: {type(error).__name__}: {first_line(error)}."
        ) from error
    check_whole(source, report)
    _check_settable(spec.name, module)
    return module


REPORTED = {"output_loading_info": True, "ignore_mismatched_sizes": True}
"""For from_pretrained, which then also returns what `check_whole` asks for: tensors of other shapes are reported, too."""


def check_whole(source: str, report: Mapping[str, Any]) -> None:
    """transformers draws at random what its loading report says is missing. Raises WeightsMissing with the tensors' names."""
    lacking = sorted(report["missing_keys"])
    lacking += [
        f"{name} (shape {list(has)} for {list(asked)})" for name, has, asked in sorted(report["mismatched_keys"])
    ]
    if lacking:
        more = f" and {len(lacking) - _NAMED} more" if len(lacking) > _NAMED else ""
        raise WeightsMissing(
            f"The weights of {source} lack {', '.join(lacking[:_NAMED])}{more}; fetch or save the whole model again."
        )


def check_bits(source: str, parameters: int, files: Iterable[Path]) -> None:
    """Raise UnsupportedModel where a configuration has more parameters than its files here have bits. A module of those sizes
    would take all time and memory before it is found to lack weights. Without files nothing is checked."""
    held = sum(file.stat().st_size for file in files)
    if held and parameters > max(8 * held, _QUICK):
        raise UnsupportedModel(
            f"The configuration of {source} describes {parameters:,} parameters, and its weights have {format_bytes(held)}; "
            "fetch or save the whole model again."
        )


@contextmanager
def _segments_of_tensors() -> Iterator[None]:
    """Inside, torch's allocator takes the memory of each tensor by itself.

    transformers would have it take one segment for all weights, to save calls. Projections that are joined afterwards leave
    holes in it, and a segment with holes is never given back to the device: 1.6 GB of an 8B Llama.
    """
    from transformers import modeling_utils

    name = "caching_allocator_warmup"
    before = getattr(modeling_utils, name, None)
    if before is not None:
        setattr(modeling_utils, name, lambda *_: None)
    try:
        yield
    finally:
        if before is not None:
            setattr(modeling_utils, name, before)


def _check_settable(name: str, module: Any) -> None:
    if not module._can_set_attn_implementation():
        raise UnsupportedModel(
            f"Model {name} ({module.config.model_type}) has its own attention code and cannot use the paged attention; "
            "choose a model of another architecture."
        )
    module.set_attn_implementation(IMPLEMENTATION)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Advice about configurations and progress bars are for people who load a model by hand."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def dequantise(source: Path, folder: Path) -> None:
    """A GGUF file as a folder of safetensors, through transformers' own reader.

    Writes config.json, generation_config.json, model.safetensors (float32: every weight as the file's format defines it)
    and the tokenizer into `folder`. Raises WeightsMissing for a file that is not whole, UnsupportedModel for one
    that transformers does not read.
    """
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        GGUFReader(source)
    except Exception as error:  # of any class, where a count, a length or an offset leads beyond the end
        raise WeightsMissing(f"{source} is not a whole GGUF file: {first_line(error)}; fetch it again.") from error
    place, name = str(source.parent), source.name
    with quiet_transformers():
        try:
            config = AutoConfig.from_pretrained(place, gguf_file=name)
            spec = ModelSpec.from_architecture(source.stem, config.to_dict())
            check_bits(str(source), spec.parameters, [source])
            tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
            module, report = AutoModelForCausalLM.from_pretrained(
                place, gguf_file=name, config=config, dtype=torch.float32, **REPORTED
            )
        except (PensieveError, MemoryError):
            raise
        except Exception as error:  # its readers end in any class of error for a file that is whole and still malformed
            raise UnsupportedModel(
                f"{source} cannot be read by transformers: {type(error).__name__}: {first_line(error)}; choose another "
                "model or file."
            ) from error
        check_whole(str(source), report)
        fields = module.config.to_dict()
        fields.pop("quantization_config", None)  # save_pretrained would refuse, and a reader would look for it
        type(module.config).from_dict(fields).save_pretrained(folder)
        module.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    weights = {name: tensor.contiguous() for name, tensor in module.state_dict().items()}
    if module.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
