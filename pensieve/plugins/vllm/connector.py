"""vLLM's OffloadingConnector with our eviction policies, and a CPU tier for it on a CPU, where vLLM's own copies refuse to
work: what runs inside vLLM 0.32, and nowhere else."""

from __future__ import annotations

import time
from typing import Any

import torch
import vllm
from vllm.config import get_current_vllm_config, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from pensieve.plugins.vllm.chunks import TailPolicy
from pensieve.plugins.vllm.options import Tiers, policy_maker, refuse_untested

THEIRS = ("lru", "arc")


class PensieveConnector(OffloadingConnector):
    """Loads eviction_policy of kv_connector_extra_config from here where it is none of vLLM's, and on a CPU the copies of
    HostWorker, where vLLM has none. All else is vLLM's."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        refuse_untested(vllm.__version__)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        if extra.get("eviction_policy", "lru") not in THEIRS:
            extra.setdefault("cache_policy_module_path", __name__)
        if current_platform.is_cpu() and "spec_name" not in extra:
            extra.update(spec_name="HostSpec", spec_module_path="pensieve.plugins.vllm")
        with set_current_vllm_config(vllm_config):  # a policy is told its capacity alone
            super().__init__(vllm_config, role, kv_cache_config)


class _Policy(TailPolicy, CachePolicy):
    policy = ""

    def __init__(self, cache_capacity: int) -> None:
        config = get_current_vllm_config()
        tiers = tiers_of(config, cache_capacity)
        make = policy_maker(self.policy, config.kv_transfer_config.kv_connector_extra_config, tiers)
        per = tiers.blocks_per_chunk
        TailPolicy.__init__(self, make, cache_capacity, per * tiers.block_tokens, per)
        self.cache_capacity = cache_capacity


def tiers_of(config: Any, chunks: int) -> Tiers:
    """config: vLLM's whole configuration."""
    model, block = config.model_config, config.cache_config.block_size
    extra = config.kv_transfer_config.kv_connector_extra_config
    elements = model.get_total_num_hidden_layers() * model.get_total_num_kv_heads() * model.get_head_size()
    return Tiers(
        architecture=model.hf_text_config.to_dict(),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(current_platform.get_device_name()),
        devices=config.parallel_config.world_size,
        block_tokens=block,
        blocks_per_chunk=int(extra.get("blocks_per_chunk") or int(extra.get("block_size") or block) // block),
        device_blocks=(config.cache_config.num_gpu_blocks or 1) - 1,  # the first is vLLM's own
        chunks=chunks,
        kv_bytes_per_token=2 * elements * model.dtype.itemsize,
    )


class HostWorker(OffloadingWorker):
    """Copies whole blocks at once: both tiers are the same memory."""

    def __init__(self, kv_caches, blocks_per_chunk, chunks):  # type: ignore[no-untyped-def]
        self._device = [cache.tensor for cache in kv_caches.tensors]
        self._host = [torch.zeros((chunks * blocks_per_chunk, one.shape[1]), dtype=one.dtype) for one in self._device]
        self._per = blocks_per_chunk
        self._over: list[TransferResult] = []

    def submit_store(self, job_id, src_spec, dst_spec) -> bool:  # type: ignore[no-untyped-def]
        return self._copy(job_id, src_spec, dst_spec, to_host=True)

    def submit_load(self, job_id, src_spec, dst_spec) -> bool:  # type: ignore[no-untyped-def]
        return self._copy(job_id, dst_spec, src_spec, to_host=False)

    def get_finished(self):  # type: ignore[no-untyped-def]
        over, self._over = self._over, []
        return over

    def wait(self, job_ids) -> None:  # type: ignore[no-untyped-def]
        return  # a job is done when it was submitted

    def _copy(self, job_id, blocks, chunks, to_host) -> bool:  # type: ignore[no-untyped-def]
        began, moved, per = time.perf_counter(), 0, self._per
        skipped = blocks.block_indices[0] % per  # blocks of the first chunk that the device has
        places = range(skipped, skipped + len(blocks.block_ids))
        at_host = torch.tensor([int(chunks.block_ids[place // per]) * per + place % per for place in places])
        at_device = torch.tensor(blocks.block_ids.tolist())
        for device, host in zip(self._device, self._host, strict=True):
            if to_host:
                host[at_host] = device[at_device]
            else:
                device[at_device] = host[at_host]
            moved += len(places) * device.shape[1] * device.element_size()
        self._over.append(TransferResult(job_id, True, moved, time.perf_counter() - began))
        return True


class HostSpec(CPUOffloadingSpec):
    BLOCK_SIZE_ALIGNMENT = 1  # no pages are pinned, so none need be whole

    def get_worker(self, kv_caches):  # type: ignore[no-untyped-def]
        return HostWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)  # type: ignore[no-untyped-call]


def __getattr__(name: str) -> Any:
    """vLLM asks for a class of the policy's name, and makes it with the capacity alone."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (_Policy,), {"policy": name})
