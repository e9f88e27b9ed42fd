"""Which model is asked for, and how it is to serve, without torch: an identity, and whoever keeps a model, ask before."""

from __future__ import annotations

import os
from typing import NamedTuple

import psutil

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


def physical_cores() -> int:
    """CPU threads where hardware.threads is null: cores this process may use, hyper-threads not counted."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))
