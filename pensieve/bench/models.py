"""The model that decode and prefill run, and the same weights as plain transformers runs them."""

from __future__ import annotations

from typing import Any

from pensieve.bench.cpu_path import LLAMA_25M
from pensieve.bench.session import Bench
from pensieve.compose import read_option
from pensieve.specs import ModelSpec
from pensieve.worker.torch.forward import TransformersForward
from pensieve.worker.torch.model import LoadedModel, load_model
from pensieve.worker.torch.shelf import take_model

ON_GPU, ON_CPU = "llama3_8b", "llama_25m"


def model_name(bench: Bench) -> str:
    """bench.model, or what fits a machine of this kind."""
    return bench.options.model or (ON_GPU if bench.on_gpu else ON_CPU)


def load(bench: Bench) -> LoadedModel:
    """With random weights: speed is what is asked. Raises PensieveError where it does not fit."""
    name = model_name(bench)
    architecture = LLAMA_25M if name == ON_CPU else read_option("model", name)["architecture"]
    dtype = str(bench.dtype).removeprefix("torch.")
    spec = ModelSpec.from_architecture(name, architecture, dtype)
    bench.model = name
    return take_model(spec, "random", None, None, bench.options.seed, bench.machine.name, bench.threads)


def plain_module(model: LoadedModel) -> Any:
    """A transformers module on its own attention (sdpa), for the peers: the same weights where ours does not run it."""
    module = model.module
    if isinstance(model.forward, TransformersForward):  # ours goes through this very module: the peers need another
        module = load_model(model.spec, "random", None, None, 0, str(model.device), model.threads, fused=False).module
    module.set_attn_implementation("sdpa")
    return module
