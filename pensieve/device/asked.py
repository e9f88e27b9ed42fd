"""Which model is asked for, and how it is to serve. Imports no torch: whoever keeps a model asks before one is loaded."""

from __future__ import annotations

from typing import NamedTuple

from pensieve.specs import ModelSpec


class ModelAsked(NamedTuple):
    """What decides a loaded model, beside its files.

    weights: "random" (from spec.architecture under `seed`, no download), "hub" (`hub_id`), or a folder written by
    save_pretrained. device: auto, cpu, cuda or cuda:N. threads: CPU threads, all physical cores by default. attention: a
    backend's name, or auto for the best that loads and passes the check with blocks of `chunk_tokens`. memory_bytes: what the
    weights may take, for whether they are packed too (fused.linear.packable); None: what the machine has free. fused: use the
    fused forward where the architecture has one and it passes the check; otherwise transformers' modules.
    """

    spec: ModelSpec
    weights: str = "random"
    hub_id: str | None = None
    revision: str | None = None
    seed: int = 0
    device: str = "cpu"
    threads: int | None = None
    attention: str = "auto"
    chunk_tokens: int = 32
    memory_bytes: int | None = None
    fused: bool = True
