"""vLLM's LLM class, driven over standard input and output: python vllm_worker.py JSON, in vLLM's own environment.

The argument: the fields of LLM(...). Lines of JSON come in ({"add": id, "prompt": [...], "tokens": n, "eos": [...]},
{"abort": id}) and go out: first {"settings": ...}, then for each step of a request {"id", "tokens", "at", "finished",
"reason", "cached", "admitted"}, or {"id", "error", "refused"}. Times are of time.perf_counter, which all processes share.
This file runs by its path, without the package.
"""

import json
import os
import queue
import sys
import threading
import time

REFUSED = "maximum"  # vLLM's words for a prompt beyond max_model_len


def main(fields: dict) -> None:  # type: ignore[type-arg]
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints goes to the log
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    began = time.perf_counter()
    engine = LLM(**fields, disable_log_stats=False).llm_engine
    print(json.dumps({"settings": settings_of(engine), "load_s": time.perf_counter() - began}), file=out)
    commands: queue.SimpleQueue = queue.SimpleQueue()  # type: ignore[type-arg]
    threading.Thread(target=read, args=(commands,), daemon=True).start()

    def add(asked: dict) -> None:  # type: ignore[type-arg]
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=asked["tokens"],
            ignore_eos=not asked["eos"],
            stop_token_ids=asked["eos"],
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        try:
            engine.add_request(asked["add"], {"prompt_token_ids": asked["prompt"]}, sampling)
        except Exception as error:  # whatever it is, this request alone ends
            said = {"id": asked["add"], "error": str(error), "refused": REFUSED in str(error)}
            print(json.dumps(said), file=out)

    while True:
        while not engine.has_unfinished_requests() or not commands.empty():
            command = commands.get()
            if command is None:
                return
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
                    "admitted": scheduled,
                }
            print(json.dumps(said), file=out)


def settings_of(engine) -> dict:  # type: ignore[no-untyped-def, type-arg]
    """As the engine's own configuration has them once it has started."""
    import torch
    import vllm

    config = engine.vllm_config
    cache, scheduler, model = config.cache_config, config.scheduler_config, config.model_config
    return {
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


def read(commands) -> None:  # type: ignore[no-untyped-def]
    for line in sys.stdin:
        commands.put(json.loads(line))
    commands.put(None)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
