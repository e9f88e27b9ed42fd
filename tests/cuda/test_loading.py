"""Memory at the start: weights go to the device one by one, and what cache.gpu=auto reserves."""

import gc
from dataclasses import replace

import pytest
import torch

from pensieve.core.plan import Row, Sample
from pensieve.device import weights as loading
from pensieve.device.asked import ModelAsked
from pensieve.device.attention import register
from pensieve.device.model import load_model
from pensieve.device.worker import TorchOptions, TorchWorker
from pensieve.errors import HardwareMissing
from pensieve.serve.systems.base import WallClock
from pensieve.specs import ModelSpec
from tests.worker.torch.driver import CHUNK, tiny_spec

from .conftest import needs_triton
from .standin.machine import CUDA

_SIZES = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 8, "intermediate_size": 1024, "vocab_size": 1024,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 512,
}  # fmt: skip
_LARGEST = 1024 * 256 * 4  # bytes of the largest tensor as the files hold it


def test_weights_go_to_the_device_tensor_by_tensor(device, tmp_path, monkeypatch):
    """The allocator takes no segment for the whole model."""
    pytest.importorskip("accelerate")
    from transformers import AutoConfig, AutoModelForCausalLM, modeling_utils

    register()
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**_SIZES)).save_pretrained(tmp_path, max_shard_size="6MB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    warm, sizes, refuse = modeling_utils.caching_allocator_warmup, [], device.refuse_beyond
    monkeypatch.setattr(device, "refuse_beyond", lambda size: (sizes.append(size), refuse(size))[1])
    asked = ModelAsked(ModelSpec.from_architecture("mine", _SIZES, "bfloat16"), str(tmp_path))
    module = loading.load_module(asked, CUDA)
    assert all(p.device == CUDA and p.dtype == torch.bfloat16 for p in module.parameters())
    assert all(b.device == CUDA for b in module.buffers())
    assert max(sizes, default=0) <= _LARGEST and modeling_utils.caching_allocator_warmup is warm
    own = loading.load_module(asked, torch.device("cpu")).state_dict()
    assert all(torch.equal(there.cpu(), own[name]) for name, there in module.state_dict().items())


@needs_triton
def test_what_auto_reserves_is_what_is_taken(device):
    """Counted on the device while a worker of that size starts, and while it samples from a limited set. The vocabulary is
    large, so that the sampler takes more than the forward."""
    options = TorchOptions(max_batch_tokens=8, max_batch_requests=4, memory_share=0.02)
    spec = tiny_spec("llama", vocab_size=4096)
    model = load_model(ModelAsked(spec, device="cuda:0", threads=1, chunk_tokens=CHUNK))
    block_bytes = CHUNK * model.spec.kv_bytes_per_token
    worker = TorchWorker(model, CHUNK, WallClock(), options=options)
    gc.collect()
    before = device.allocated
    blocks = worker.room()
    gc.collect()
    assert device.allocated == before, "nothing of the rehearsal stays"
    settings = worker.start(blocks, 0).settings
    standing_bytes, iteration_bytes = settings["standing_bytes"], settings["iteration_bytes"]
    gc.collect()
    assert settings["graphs"] == "on"
    assert device.allocated - before - blocks * block_bytes == standing_bytes > block_bytes, (
        "more than the scratch block"
    )
    taken = {}
    for temperature in (0.0, 1.0):
        rows = [Row(0, ((0, 2),), (5, 6), Sample(2, temperature=temperature, top_p=0.9)) for _ in range(4)]
        gc.collect()
        device.peak = standing = device.allocated
        worker._try(rows, 2)
        taken[temperature] = device.peak - standing
    assert taken[0.0] < taken[1.0] <= iteration_bytes < 2 * taken[1.0]
    hungry = TorchWorker(model, CHUNK, WallClock(), options=replace(options, memory_share=1e-6))
    with pytest.raises(HardwareMissing, match=r"finds no room .* An iteration of 8 tokens needs .*memory_share=1e-06"):
        hungry.room()
    share = 0.02 * device.card.memory
    assert share * 0.96 < standing + iteration_bytes <= share, "all of its share, but for the rounding"
    worker.close()
