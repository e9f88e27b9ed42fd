"""A GGUF file as a folder of safetensors, through transformers' own reader."""

from __future__ import annotations

from pathlib import Path

import torch

from pensieve.errors import UnsupportedModel, WeightsMissing
from pensieve.hub import first_line
from pensieve.worker.torch.model import REPORTED, check_whole, quiet_transformers


def dequantise(source: Path, folder: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors (float32: every weight as the file's format defines it)
    and the tokenizer into `folder`. Raises WeightsMissing for a file that cannot be read, UnsupportedModel for an
    architecture that transformers does not know."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place, name = str(source.parent), source.name
    with quiet_transformers():
        try:
            module, report = AutoModelForCausalLM.from_pretrained(
                place, gguf_file=name, dtype=torch.float32, **REPORTED
            )
            tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
        except (ValueError, KeyError, NotImplementedError) as error:
            if source.open("rb").read(4) != b"GGUF":
                raise WeightsMissing(f"{source} is no GGUF file.") from error
            raise UnsupportedModel(
                f"{source} cannot be read by transformers ({first_line(error)}); choose another model or file."
            ) from error
        except (OSError, RuntimeError, IndexError) as error:
            raise WeightsMissing(f"{source} cannot be read: {first_line(error)}.") from error
        check_whole(str(source), report)
        config = module.config.to_dict()
        config.pop("quantization_config", None)  # save_pretrained would refuse, and a reader would look for it
        type(module.config).from_dict(config).save_pretrained(folder)
        module.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    weights = {name: tensor.contiguous() for name, tensor in module.state_dict().items()}
    if module.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
