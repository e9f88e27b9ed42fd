"""vLLM's OffloadingConnector with our eviction policies: what runs inside vLLM 0.32, and nowhere else."""

from __future__ import annotations

import os
from typing import Any

import vllm
from vllm.config import get_current_vllm_config, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy

from pensieve.errors import ConfigError
from pensieve.plugins.vllm.chunks import TailPolicy
from pensieve.plugins.vllm.options import Tiers, policy_maker

TESTED = "0.32."
UNTESTED_ENV = "PENSIEVE_VLLM_UNTESTED"
THEIRS = ("lru", "arc")


class PensieveConnector(OffloadingConnector):
    """Loads eviction_policy of kv_connector_extra_config from here where it is none of vLLM's, and on a CPU the copies of
    host.py, where vLLM has none. All else is vLLM's."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        refuse_untested(vllm.__version__)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        if extra.get("eviction_policy", "lru") not in THEIRS:
            extra.setdefault("cache_policy_module_path", __name__)
        if current_platform.is_cpu() and "spec_name" not in extra:
            extra.update(spec_name="HostSpec", spec_module_path="pensieve.plugins.vllm")
        with set_current_vllm_config(vllm_config):  # a policy is told its capacity alone
            super().__init__(vllm_config, role, kv_cache_config)


def refuse_untested(version: str) -> None:
    """Raises ConfigError: the contract of policies changes from version to version of vLLM."""
    if not version.startswith(TESTED) and not os.environ.get(UNTESTED_ENV):
        raise ConfigError(
            f"This vLLM is {version}, and the plug-in is tested with {TESTED}*; test it in a checkout of Pensieve with "
            f"`make vllm-compat VLLM=vllm=={version}`, and set {UNTESTED_ENV}=1 if that passes."
        )


class _Policy(TailPolicy, CachePolicy):
    policy = ""

    def __init__(self, cache_capacity: int) -> None:
        config = get_current_vllm_config()
        extra = config.kv_transfer_config.kv_connector_extra_config
        tiers = tiers_of(config, cache_capacity)
        make = policy_maker(self.policy, extra, tiers)
        chunk_tokens = tiers.block_tokens * tiers.blocks_per_chunk
        TailPolicy.__init__(self, make, cache_capacity, chunk_tokens, tiers.blocks_per_chunk)
        self.cache_capacity = cache_capacity


def tiers_of(config: Any, chunks: int) -> Tiers:
    """config: vLLM's whole configuration."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    extra = config.kv_transfer_config.kv_connector_extra_config
    per = int(extra.get("blocks_per_chunk") or int(extra.get("block_size") or cache.block_size) // cache.block_size)
    heads = model.get_total_num_kv_heads()
    dtype = str(model.dtype).removeprefix("torch.")
    layers = model.get_total_num_hidden_layers()
    return Tiers(
        architecture=model.hf_text_config.to_dict(),
        dtype=dtype,
        device=str(current_platform.get_device_name()),
        devices=parallel.world_size,
        block_tokens=cache.block_size,
        blocks_per_chunk=per,
        device_blocks=(cache.num_gpu_blocks or 1) - 1,  # the first is vLLM's own
        chunks=chunks,
        kv_bytes_per_token=2 * layers * heads * model.get_head_size() * model.dtype.itemsize,
    )


def __getattr__(name: str) -> Any:
    """vLLM asks for a class of the policy's name, and makes it with the capacity alone."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (_Policy,), {"policy": name})
