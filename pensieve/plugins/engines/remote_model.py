"""The model where it is computed: with weights and KV that stay, or with whatever comes along with a step."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

import torch
from transformers import DynamicCache

from pensieve.core.request import TokenArray
from pensieve.device.sampler import greedy
from pensieve.plugins.engines.base import EngineSetup
from pensieve.plugins.engines.transformers_peers import versions
from pensieve.plugins.engines.weights import plain_module
from pensieve.plugins.engines.wire import KV, LOGITS, Array, Said, Wire, computed

WARM_TOKENS = 8


class RemoteModel:
    """A transformers module of the very weights that our engine runs, attending by sdpa, as plain generate does.

    keeps_weights False: its parameters are empty but during a step, which brings them along.
    """

    def __init__(self, setup: EngineSetup, keeps_weights: bool) -> None:
        began = perf_counter()
        self._module = plain_module(setup)
        self.load_s = perf_counter() - began
        self._forward(array("i", [0] * WARM_TOKENS), DynamicCache())
        self.weight_bytes = sum(one.size for one in weight_arrays(self._module).values())
        self._keeps_weights = keeps_weights
        self._drop_weights()

    def step(self, ids: TokenArray[int], arrays: Mapping[str, Array]) -> tuple[dict[str, Array], float, float]:
        """Compute these positions: what goes back (logits of the last one, KV of all), when compute began and when it ended
        (time.perf_counter)."""
        given = {name: tensor_of(one).to(self._module.device) for name, one in arrays.items()}
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(given.pop(KV, ())):  # as kv_array
            cache.update(keys[None], values[None], layer)
        if not self._keeps_weights:
            for name, parameter in self._module.named_parameters():
                parameter.data = given[name]
        began = perf_counter()
        try:
            logits = self._forward(ids, cache)
        finally:
            ended = perf_counter()
            self._drop_weights()
        kv = torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers])
        return {LOGITS: array_of(logits), KV: array_of(kv)}, began, ended

    def generate(self, wire: Wire, said: Said, waited: float) -> None:
        """Send greedy tokens, each as soon as it is drawn, until the last one or until the client says something. Their KV
        stays for as long as this request."""
        cache, ids, computed_s = DynamicCache(), array("i", said["ids"]), 0.0
        for left in reversed(range(said["tokens"])):
            began = perf_counter()
            drawn = int(greedy(self._forward(ids, cache)))
            computed_s += perf_counter() - began
            last = not left or drawn in said["ends"]
            if not last and wire.waiting:
                wire.receive()
                last = True
            if last:
                wire.send(computed(waited, computed_s, drawn))
                return
            began = perf_counter()
            wire.send({"token": drawn})
            waited += perf_counter() - began
            ids = array("i", [drawn])

    def _forward(self, ids: TokenArray[int], cache: DynamicCache) -> torch.Tensor:
        """[vocab]: logits of the last position."""
        device = self._module.device
        rows = torch.tensor([list(ids)], device=device)
        with torch.inference_mode():
            logits: torch.Tensor = self._module(
                input_ids=rows, past_key_values=cache, use_cache=True, logits_to_keep=1
            ).logits[0, -1]
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return logits

    def _drop_weights(self) -> None:
        for parameter in () if self._keeps_weights else self._module.parameters():
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)


def weight_arrays(module: Any) -> dict[str, Array]:
    """Every parameter once, as it crosses; tied ones are one."""
    return {name: array_of(parameter.data) for name, parameter in module.named_parameters()}


def array_of(tensor: torch.Tensor) -> Array:
    """Its own memory where it is contiguous on the CPU, else a copy."""
    flat = tensor.detach().cpu().contiguous()
    data = memoryview(flat.reshape(-1).view(torch.uint8).numpy())
    return Array(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)


def tensor_of(array: Array) -> torch.Tensor:
    """Over the memory of the array, which nobody else uses."""
    return torch.frombuffer(array.data, dtype=getattr(torch, array.dtype)).reshape(array.shape)


# -- its process ----------------------------------------------------------------------------------------------------------


def host(commands: Connection, answers: Connection) -> None:
    """Load the model that is asked for, say what it is, and serve one client until that is gone."""
    setup, keeps_weights = commands.recv()
    model = RemoteModel(setup, keeps_weights)
    answers.send({"load_s": model.load_s, "weight_bytes": model.weight_bytes, **versions()})
    wire = Wire(commands, answers, setup.network_gbps)
    with suppress(EOFError, OSError):  # the client is gone
        while True:
            said, arrays, flight_s = wire.receive()
            here = perf_counter()
            try:
                if said.get("do") == "step":
                    back, began, ended = model.step(array("i", said["ids"]), arrays)
                    wire.send(computed(flight_s + began - here, ended - began), back, began_s=ended)
                elif said.get("do") == "generate":
                    model.generate(wire, said, flight_s)
            except (RuntimeError, IndexError, ValueError, KeyError) as error:
                wire.send({"error": f"The model's process failed the request: {error!r}"})
