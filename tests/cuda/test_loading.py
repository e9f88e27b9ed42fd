"""Weights go from their files to the device: the host never holds the whole model in memory of its own."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pensieve.device import weights as loading
from pensieve.device.asked import ModelAsked
from pensieve.device.attention import register
from pensieve.specs import ModelSpec

from .standin import operations
from .standin.machine import CUDA
from .standin.tensors import tensors_in

_SIZES = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 8, "intermediate_size": 1024, "vocab_size": 1024,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 512,
}  # fmt: skip
_LARGEST = 1024 * 256 * 4  # bytes of the largest tensor as the files hold it


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same float32 weights in one file, and in several with an index."""
    from transformers import AutoConfig, AutoModelForCausalLM

    register()
    torch.manual_seed(0)
    sizes = dict(_SIZES)
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(sizes.pop("model_type"), **sizes))
    at = tmp_path_factory.mktemp("weights")
    module.save_pretrained(at / "one")
    module.save_pretrained(at / "several", max_shard_size="6MB")
    assert (at / "several" / "model.safetensors.index.json").is_file()
    return {"one": at / "one", "several": at / "several"}


def _load(folder, dtype, device):
    return loading.load_module(ModelAsked(ModelSpec.from_architecture("mine", _SIZES, dtype), str(folder)), device)


def _watch_host(device, patch):
    """The most bytes that tensors made on the host held together, as they were at each allocation on the device. Views of a
    mapped file are none of them: its pages are the system's, which takes them back when it likes."""
    made = {}
    most = [0]
    of_the_host, allocate = operations._of_the_host, device.allocate

    def seen(func, *rest):
        result = of_the_host(func, *rest)
        if not operations._gives_view(func):
            for tensor in tensors_in(result):
                if tensor.device.type == "cpu":  # and not meta
                    storage = tensor.untyped_storage()
                    made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def watched(inner):
        own = inner.untyped_storage()._cdata
        held = (size for at, (storage, size) in list(made.items()) if at != own and not storage.expired())
        most[0] = max(most[0], sum(held))
        return allocate(inner)

    patch.setattr(operations, "_of_the_host", seen)
    patch.setattr(device, "allocate", watched)
    return lambda: most[0]


@pytest.mark.parametrize("files", ["one", "several"])
def test_weights_go_to_the_device_tensor_by_tensor(device, folders, files, monkeypatch):
    """Files in float32, a model in bfloat16: what is converted is memory of the host's own."""
    pytest.importorskip("accelerate")
    most_held = _watch_host(device, monkeypatch)
    module = _load(folders[files], "bfloat16", CUDA)
    weights = sum(p.nbytes for p in module.parameters())
    assert all(p.device == CUDA and p.dtype == torch.bfloat16 for p in module.parameters())
    assert all(b.device == CUDA for b in module.buffers())
    assert most_held() <= 4 * _LARGEST < weights / 4  # four threads read at once
    own = _load(folders[files], "bfloat16", torch.device("cpu"))
    for name, there in module.state_dict().items():
        assert torch.equal(there.cpu(), own.state_dict()[name]), name


def test_the_allocator_takes_no_segment_for_the_whole_model(device, folders, monkeypatch):
    pytest.importorskip("accelerate")
    from transformers import modeling_utils

    warm = modeling_utils.caching_allocator_warmup
    sizes, refuse = [], device.refuse_beyond
    monkeypatch.setattr(device, "refuse_beyond", lambda size: (sizes.append(size), refuse(size))[1])
    module = _load(folders["one"], "float32", CUDA)
    weights = sum(p.nbytes for p in module.parameters())
    assert max(sizes, default=0) <= _LARGEST < weights / 4
    assert modeling_utils.caching_allocator_warmup is warm
