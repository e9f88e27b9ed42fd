"""Fit the roofline of the attention kernel to the tables beside this file: `python -m pensieve.sim.tables.fit_attention`.

The mean of the logarithmic errors is the least; each card weighs the same, small batches as much as large ones. How far it
can be trusted on a card that nobody measured is told by fitting it to one card and holding it against the other.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from pensieve.sim.kernel_tables import Shape, read
from pensieve.sim.measured import AttentionFit, Batch

HERE = Path(__file__).parent

CARDS = {  # data sheets: dense 16-bit FLOP/s with 32-bit sums, bytes/s, multiprocessors
    "rtx4090": (165.2e12, 1.008e12, 128),
    "rtxpro6000": (500e12, 1.597e12, 188),
}
TABLES = {
    "rtx4090": ("llama3_8b_tp1",),
    "rtxpro6000": ("llama3_8b_tp1", "llama3_8b_tp2", "qwen3_32b_tp1", "qwen3_32b_tp2"),
}
_START = (8e-6, 8e-6, 0.5, 0.5, 0.8)
_NEVER = 1e30

Cells = tuple[NDArray[np.float64], ...]
"""work, longest tile, bytes of decodes alone (each the seconds at the whole peak), and the seconds measured."""


def cells_of(card: str) -> Cells:
    flops, memory_bw, processors = CARDS[card]
    work = AttentionFit(0.0, 0.0, 1.0, _NEVER, _NEVER)
    reading = AttentionFit(0.0, 0.0, _NEVER, _NEVER, 1.0)
    longest = AttentionFit(0.0, 0.0, _NEVER, 1.0, _NEVER)
    rows: list[tuple[float, float, float, float]] = []
    for name in TABLES[card]:
        content = read(f"{card}/{name}.json.gz")
        shape, grid = Shape(**content["shape"]), content["attention"]
        axes = (grid[axis] for axis in ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode"))
        for (chunk, kv, decodes, decode_kv), us in zip(product(*axes), grid["us"], strict=True):
            if us is None:
                continue
            runs = [(kv, kv + chunk)] if chunk else []
            batch = Batch.of(runs + [(decode_kv, decode_kv + 1)] * decodes, None)
            by = [part.seconds(batch, shape, flops, memory_bw, processors) for part in (work, longest, reading)]
            rows.append((by[0], by[1], 0.0, us * 1e-6) if chunk else (0.0, 0.0, by[2], us * 1e-6))
    return tuple(np.array(column) for column in zip(*rows, strict=True))


def predicted(values: NDArray[np.float64], cells: Cells) -> NDArray[np.float64]:
    work, longest, moved, _ = cells
    floor, decode_floor, compute, serial, memory = values
    mixed = floor + np.maximum(work / compute, longest / serial)
    return np.asarray(np.where(moved > 0, decode_floor + moved / memory, mixed))


def fit(cards: list[str]) -> AttentionFit:
    """Each card weighs the same, whatever the number of its cells."""
    measured = [cells_of(card) for card in cards]

    def error(logs: NDArray[np.float64]) -> float:
        values = np.exp(logs)
        return float(np.mean([np.abs(np.log(predicted(values, cells) / cells[3])).mean() for cells in measured]))

    found = minimize(
        error, np.log(_START), method="Nelder-Mead", options={"maxiter": 6000, "xatol": 1e-4, "fatol": 1e-7}
    )
    return AttentionFit(*(float(f"{value:.4g}") for value in np.exp(found.x)))


def errors(fitted: AttentionFit, card: str) -> dict[str, float]:
    cells = cells_of(card)
    relative = 100 * np.abs(predicted(np.array(list(asdict(fitted).values())), cells) / cells[3] - 1)
    decodes = cells[2] > 0
    return {
        "cells": len(relative),
        "median_pct": round(float(np.median(relative)), 1),
        "p90_pct": round(float(np.quantile(relative, 0.9)), 1),
        "decode_median_pct": round(float(np.median(relative[decodes])), 1),
    }


def fitted() -> dict[str, Any]:
    """The content of attention_fit.json."""
    both = fit(list(CARDS))
    unseen = {card: errors(fit([other for other in CARDS if other != card]), card) for card in CARDS}
    return {
        "fit": asdict(both),
        "errors": {"fitted": {card: errors(both, card) for card in CARDS}, "fitted_to_the_other_card": unseen},
        "source": "attention.csv of LLMServingSim 2.0 (MIT, Copyright (c) 2024, CASYS Lab at KAIST)",
    }


if __name__ == "__main__":
    content = fitted()
    (HERE / "attention_fit.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(content, indent=1))
