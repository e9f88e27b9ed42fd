"""The same models in fewer and larger operations a layer, for the architectures written here.

transformers' modules spend most of a decode step on dispatch. Here the projections that read one input are one product,
a norm is one kernel, rotary angles are made once a batch, and the last layer's MLP runs for the sampled rows only. The
weights are the transformers module's, which stays usable and is what the self-check compares with.
"""

from collections.abc import Callable
from typing import Any

from pensieve.device.fused.decoder import FusedModel, packable
from pensieve.device.fused.learned import build_gpt2, build_opt
from pensieve.device.fused.rotary import build_rotary

_BUILDERS: dict[str, Callable[[Any, bool], FusedModel | str]] = {
    "llama": build_rotary,
    "mistral": build_rotary,
    "qwen2": build_rotary,
    "qwen3": build_rotary,
    "gemma2": build_rotary,
    "gpt2": build_gpt2,
    "opt": build_opt,
}


def build_fused(module: Any, pack: bool | None = None, memory_bytes: int | None = None) -> FusedModel | str:
    """The fused forward of a loaded transformers model, or in a few words why it has none.

    pack: copy the weights into oneDNN's layout and do in C what is faster there; by default where that is possible and
    leaves room in memory_bytes, of which packable tells. The module's joined parameters become views. Raises EngineMissing
    where it is asked for and no compiler is here.
    """
    builder = _BUILDERS.get(module.config.model_type)
    if builder is None:
        return f"none for {module.config.model_type}"
    if getattr(module, "is_quantized", False):
        return "quantized weights"
    try:
        return builder(module, packable(module, memory_bytes) if pack is None else pack)
    except AttributeError as error:  # another version of transformers, in which the modules have other parts
        return f"modules of another make: {error}"
