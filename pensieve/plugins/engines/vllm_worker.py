"""vLLM's LLM class, driven over standard input and output: python vllm_worker.py JSON, in vLLM's own environment.

The argument: the fields of LLM(...). Dictionaries come in ({"add": id, "prompt": [...], "tokens": n, "eos": [...], "said":
{...} of its conversation}, {"abort": id}) and go out: first {"settings": ...}, or {"refused": ...} by our own code there,
then for each step of a request {"id", "tokens", "at", "finished", "reason", "cached", "cached_on_host", "admitted",
"policy_failure"}, or {"id", "error", "refused"}. Times are of time.perf_counter, which all processes share.
This file runs by its path: of the package around it only what vLLM's configuration names is imported.
"""

import importlib.util
import json
import os
import sys
import time
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

REFUSED = "maximum"  # vLLM's words for a prompt beyond max_model_len


def main(fields: dict) -> None:  # type: ignore[type-arg]
    commands, out = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # what vLLM prints goes to the log
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    offloads = "kv_transfer_config" in fields
    if offloads:
        load_package()
    began = time.perf_counter()
    try:
        engine = LLM(**fields, disable_log_stats=False).llm_engine
    except Exception as error:
        if not type(error).__module__.startswith("pensieve"):
            raise
        out.send({"refused": str(error)})
        return
    out.send({"settings": settings_of(engine), "load_s": time.perf_counter() - began})
    scheduler = engine.engine_core.engine_core.scheduler
    tier: Any = scheduler.connector.connector_scheduler if offloads else None
    on_host = watch_host(engine.engine_core)

    def add(asked: dict) -> None:  # type: ignore[type-arg]
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=asked["tokens"],
            ignore_eos=not asked["eos"],
            stop_token_ids=asked["eos"],
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"kv_transfer_params": asked["said"]} if asked["said"] else None,
        )
        try:
            engine.add_request(asked["add"], {"prompt_token_ids": asked["prompt"]}, sampling)
        except Exception as error:  # whatever it is, this request alone ends
            out.send({"id": asked["add"], "error": str(error), "refused": REFUSED in str(error)})

    while True:
        while offloads and scheduler.has_requests() and not engine.has_unfinished_requests() and not commands.poll():
            engine.step()  # as its server does: what the last request has left to store is stored while nobody asks
        while not engine.has_unfinished_requests() or commands.poll():
            try:
                command = commands.recv()
            except EOFError:
                return
            if "now_s" in command:  # a replay: nothing depends on how soon the request comes
                while scheduler.has_requests() and not engine.has_unfinished_requests():
                    engine.step()
                tier.manager._policy._clock = partial(float, command["now_s"])
            if "add" in command:
                add(command)
            else:
                engine.abort_request([command["abort"]])
        for output in engine.step():
            one = output.outputs[0]
            said = {"id": output.request_id, "tokens": list(one.token_ids), "at": time.perf_counter()}
            if output.finished:
                scheduled = getattr(output.metrics, "scheduled_ts", None)
                said |= {
                    "finished": True,
                    "reason": one.finish_reason,
                    "cached": output.num_cached_tokens,
                    "cached_on_host": on_host.pop(output.request_id, None) if offloads else None,
                    "admitted": scheduled,
                    "policy_failure": failure_of(tier),
                }
            out.send(said)


def failure_of(tier) -> str | None:  # type: ignore[no-untyped-def]
    failure = getattr(tier.manager._policy, "failure", None) if tier is not None else None
    return repr(failure) if failure else None


def load_package() -> None:
    """Make the package around this file one that vLLM finds by its name, and nothing that is installed beside it."""
    folder = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
    spec = importlib.util.spec_from_file_location(
        "pensieve", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec is not None and spec.loader is not None
    module = sys.modules["pensieve"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def watch_host(core) -> dict:  # type: ignore[no-untyped-def, type-arg]
    """By request, how many of its cached tokens came from behind the device. vLLM names a request anew, with a suffix."""
    found: dict = {}  # type: ignore[type-arg]
    get_output = core.get_output

    def watched():  # type: ignore[no-untyped-def]
        said = get_output()
        for one in said.outputs:
            if one.prefill_stats is not None:
                found[one.request_id.rsplit("-", 1)[0]] = one.prefill_stats.num_external_cached_tokens
        return said

    core.get_output = watched
    return found


def settings_of(engine) -> dict:  # type: ignore[no-untyped-def, type-arg]
    """As the engine's own configuration has them once it has started."""
    import torch
    import vllm

    config = engine.vllm_config
    cache, scheduler, model = config.cache_config, config.scheduler_config, config.model_config
    connector = engine.engine_core.engine_core.scheduler.connector
    host = {} if connector is None else {"host_chunks": connector.connector_scheduler.manager._num_chunks}
    return {
        **host,
        "version": vllm.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "block_size": cache.block_size,
        "num_blocks": cache.num_gpu_blocks,
        "kv_type": str(cache.cache_dtype),
        "prefix_caching": bool(cache.enable_prefix_caching),
        "max_batch_tokens": scheduler.max_num_batched_tokens,
        "max_batch_requests": scheduler.max_num_seqs,
        "dtype": str(model.dtype).removeprefix("torch."),
        "n_ctx": model.max_model_len,
    }


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
