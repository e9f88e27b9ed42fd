"""A GGUF file as a folder of safetensors, through transformers' own reader."""

from pathlib import Path

import torch

from pensieve.device.weights import REPORTED, check_bits, check_whole, quiet_transformers
from pensieve.errors import PensieveError, UnsupportedModel, WeightsMissing
from pensieve.hub import first_line
from pensieve.specs import ModelSpec


def dequantise(source: Path, folder: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors (float32: every weight as the file's format defines it)
    and the tokenizer into `folder`. Raises WeightsMissing for a file that is not whole, UnsupportedModel for one
    that transformers does not read."""
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
