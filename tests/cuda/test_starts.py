"""What cache.gpu=auto reserves beside the blocks."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest

from pensieve.core.plan import Row, Sample
from pensieve.device.asked import ModelAsked
from pensieve.device.model import load_model
from pensieve.device.worker import TorchOptions, TorchWorker
from pensieve.errors import HardwareMissing
from pensieve.serve.systems.base import WallClock
from tests.worker.torch.driver import tiny_spec

from .conftest import needs_triton
from .serving import CHUNK


@pytest.mark.parametrize("graphs", [pytest.param(True, marks=needs_triton), False], ids=["graphs", "eager"])
def test_what_auto_reserves_is_what_is_taken(device, graphs):
    """Counted on the device while a worker of that size starts, and while it samples from a limited set. The vocabulary is
    large, so that the sampler takes more than the forward."""
    options = TorchOptions(max_batch_tokens=8, max_batch_requests=4, memory_share=0.02, graphs=graphs)
    spec = tiny_spec("llama", vocab_size=4096)
    model = load_model(ModelAsked(spec, device="cuda", threads=1, chunk_tokens=CHUNK))
    block_bytes = CHUNK * model.spec.kv_bytes_per_token
    worker = TorchWorker(model, CHUNK, WallClock(), options=options)
    gc.collect()
    before = device.allocated
    blocks, room = worker.room(), worker._room
    assert room is not None
    gc.collect()
    assert device.allocated == before, "nothing of the rehearsal stays"
    settings = worker.start(blocks, 0).settings
    gc.collect()
    assert settings["graphs"] == ("on" if graphs else "off")
    assert device.allocated - before - blocks * block_bytes == room.standing_bytes == settings["standing_bytes"]
    assert (room.standing_bytes > block_bytes) is graphs, "more than the scratch block"
    taken = {}
    for temperature in (0.0, 1.0):
        rows = [Row(0, ((0, 2),), (5, 6), Sample(2, temperature=temperature, top_p=0.9)) for _ in range(4)]
        gc.collect()
        device.peak = standing = device.allocated
        worker._try(rows, 2)
        taken[temperature] = device.peak - standing
    assert taken[0.0] < taken[1.0] <= room.iteration_bytes < 2 * taken[1.0]
    hungry = TorchWorker(model, CHUNK, WallClock(), options=replace(options, memory_share=1e-6))
    with pytest.raises(HardwareMissing, match=r"finds no room .* An iteration of 8 tokens needs .*memory_share=1e-06"):
        hungry.room()
    share = 0.02 * device.card.memory
    assert share * 0.96 < standing + room.iteration_bytes <= share, "all of its share, but for the rounding"
    worker.close()
