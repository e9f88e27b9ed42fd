"""The models that targets run (random weights: only speed is asked), and the same weights in transformers' modules."""

from __future__ import annotations

from typing import Any

from pensieve.device.asked import ModelAsked
from pensieve.device.attention import TransformersForward
from pensieve.device.model import LoadedModel, load_model
from pensieve.lab.bench.session import Bench
from pensieve.lab.compose import read_option
from pensieve.lab.results.trials import sentence, served_of
from pensieve.plugins.device.shelf import take_model
from pensieve.specs import ModelSpec

CHUNK = 32  # tokens of a KV block
ON_GPU, ON_CPU = "llama3_8b", "llama_25m"


def spec_of(name: str, dtype: str = "float32") -> ModelSpec:
    """name: an option of conf/model. Raises PensieveError."""
    architecture = read_option("model", name)["architecture"]
    return ModelSpec.from_architecture(name, architecture, dtype)


def load(bench: Bench) -> LoadedModel:
    """bench.model, or one that suits a machine of this kind. Raises PensieveError where it does not fit."""
    bench.model = bench.options.model or (ON_GPU if bench.on_gpu else ON_CPU)
    spec = spec_of(bench.model, str(bench.dtype).removeprefix("torch."))
    model = take_model(ModelAsked(spec, "random", None, None, bench.options.seed, bench.machine.name, bench.threads))
    said = sentence(served_of(model.served()), [model.served()])
    if said not in bench.sentences:
        bench.sentences.append(said)
    return model


def plain_module(model: LoadedModel) -> Any:
    """A transformers module on its own attention (sdpa), for the peers: with the same weights where ours does not run it."""
    module = model.module
    if isinstance(model.forward, TransformersForward):  # ours runs this very module: the peers need another
        module = load_model(ModelAsked(model.spec, device=str(model.device), threads=model.threads, fused=False)).module
    module.set_attn_implementation("sdpa")
    return module
