"""What two models must share for the tokens and the KV of one to mean the same to the other."""

from __future__ import annotations

from pensieve.compose.schema import ModelConfig
from pensieve.compose.weights import weights_identity


def model_identity(model: ModelConfig, simulated: bool) -> str:
    """A digest of architecture, tokenizer, dtype, and of the weights' content as far as it is known before they are loaded:
    of a folder or file all of it, of the hub the commit, of random weights their seed. simulated: no weights at all."""
    from pensieve.results.identity import config_hash  # which imports the database

    weights = None if simulated else weights_identity(model)
    return config_hash({"model": model.model_dump(), "weights_content": weights, "simulated": simulated})
