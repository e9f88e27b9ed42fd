"""Our policies behind vLLM's own CPUOffloadingManager, without a model: python vllm_contract.py, in vLLM's environment.

Prints a JSON object: by policy, its failure and the keys that left, in order; of `broken`, which fails at its first choice,
and of vLLM's own lru.
"""

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from vllm.config import set_current_vllm_config
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from pensieve.core.policies.base import EvictionPolicy

CHUNKS, BLOCK = 40, 32
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 96, "vocab_size": 320, "max_position_embeddings": 2048,
}  # fmt: skip


class Broken(EvictionPolicy):
    def order(self, session, chunk):
        raise RuntimeError("broken")


def configured():
    """As much of vLLM's configuration as a policy reads."""
    model = SimpleNamespace(
        dtype=torch.float32,
        hf_text_config=SimpleNamespace(to_dict=lambda: LLAMA),
        get_total_num_kv_heads=lambda: 1,
        get_total_num_hidden_layers=lambda: 2,
        get_head_size=lambda: 32,
    )
    return SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(block_size=BLOCK, num_gpu_blocks=33),
        parallel_config=SimpleNamespace(world_size=1),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}),
    )


def left(policy, named):
    """The keys that left the tier under a load, and the policy's failure."""
    module = None if policy == "lru" else "pensieve.plugins.vllm.connector"
    with set_current_vllm_config(configured()):
        manager = CPUOffloadingManager(CHUNKS, cache_policy=policy, cache_policy_module_path=module)
    rng, gone, histories = random.Random(0), [], {user: [] for user in range(8)}
    under_way = []  # stores and loads that are not over
    for number in range(300):
        user = rng.randrange(8)
        said = histories[user]
        for _ in range(rng.randrange(1, 4)):
            said.append(bytes([user, len(said), rng.randrange(256)]))
        if len(said) > 20:
            del said[1:]
        keys = [make_offload_key(key, 0) for key in said]
        params = {"session": str(user), "stop_reason": "tool_use"} if named else None
        request = ReqContext(str(number), kv_transfer_params=params)
        for index, key in enumerate(keys, 1):
            request.set_offload_key_position(key, index * BLOCK)
        manager.on_new_request(request)
        loaded = 0
        while loaded < len(keys) and manager.lookup(keys[loaded], request) is LookupResult.HIT:
            loaded += 1
        if loaded:
            manager.prepare_load(keys[:loaded], request)
            under_way.append((manager.complete_load, keys[:loaded], request))
        stored = manager.prepare_store(keys[loaded:], request)
        if stored is not None:
            gone += [key.hex() for key in stored.evicted_keys]
            under_way.append((manager.complete_store, stored.keys_to_store, request))
        manager.on_request_finished(request)
        while under_way and rng.random() < 0.7:
            complete, those, whose = under_way.pop(rng.randrange(len(under_way)))
            complete(those, whose)
    failure = getattr(manager._policy, "failure", None)
    manager.reset_cache()
    assert manager._policy.get(keys[0]) is None
    return {"gone": gone, "failure": failure and repr(failure)}


if __name__ == "__main__":
    sys.modules["vllm_contract"] = sys.modules["__main__"]
    print(json.dumps({f"{name} {named}": left(name, named) for name in sys.argv[1:] for named in (True, False)}))
