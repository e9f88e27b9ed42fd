"""llama.cpp: its server in a process of its own, over the loopback interface.

It is the C++ server of xllamacpp, a wheel that needs no compiler. Prompts are token ids; see weights.py for how replies
become ids again.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from pensieve.core.plan import StartReport
from pensieve.core.request import Free, Request
from pensieve.errors import ConfigError, EngineMissing
from pensieve.plugins.engines.base import Channel, EngineSetup, OutsideEngine, Reply
from pensieve.plugins.engines.completions import CompletionsClient, read_completion, while_it_serves
from pensieve.plugins.engines.process import EngineProcess, free_port
from pensieve.plugins.engines.weights import gguf_file, refuse_family, tokens_in
from pensieve.serve.systems.base import Capabilities
from pensieve.units import ceil_div

MOST_SLOTS = 4
CELLS = 256
WAITING = 64  # requests that may wait in the server's own queue
ALL_LAYERS = 10_000  # more than any model has
PATH = "/v1/completions"


class LlamaCpp(OutsideEngine):
    """n_parallel: slots, among which the cells of cache.gpu are divided; null: at most 4, no more than
    scheduler.max_batch_requests, and few enough to hold the longest conversation. kv_unified: slots share all cells instead.
    start_timeout_s: until it must be healthy.

    A model in float32 has its weights and KV in f32, and no flash attention: so it gives the tokens that our engine gives.
    One in 16 bits has both in f16, and flash attention where the server thinks fit. The KV of idle slots may take cache.cpu
    of host memory. All layers run on the GPU of hardware=, on a CPU none does.
    """

    def __init__(
        self,
        setup: EngineSetup,
        *,
        n_parallel: int | None = None,
        kv_unified: bool = False,
        start_timeout_s: float = 120.0,
    ) -> None:
        self.can = Capabilities()
        self.at_once = WAITING
        self._setup = setup
        each = ceil_div((setup.longest_tokens or 0) + setup.block_tokens, CELLS) * CELLS
        self._type = "f32" if setup.model.dtype == "float32" else "f16"
        slots = n_parallel or max(1, min(MOST_SLOTS, setup.batch_requests, setup.kv_tokens // each))
        share = CELLS if kv_unified else CELLS * slots
        self._timeout_s = start_timeout_s
        self._process: EngineProcess | None = None
        self._client: CompletionsClient | None = None
        self._fields: dict[str, Any] = {
            "n_ctx": max(share, setup.kv_tokens // share * share),  # a slot has a multiple of CELLS, rounded up
            "n_batch": setup.batch_tokens,
            "n_parallel": slots,
            "threads": setup.threads,
            "kv_type": self._type,
            "n_gpu_layers": ALL_LAYERS * (setup.device != "cpu"),
            "main_gpu": int(setup.device.partition(":")[2] or 0),
            "ram_cache_mib": setup.host_tokens * setup.model.kv_bytes_per_token // 2**20,
            "kv_unified": kv_unified,
        }

    def check(self) -> None:
        refuse_family(self._setup.model.name, self._setup.model.architecture)
        if find_spec("gguf") is None or find_spec("xllamacpp") is None:
            raise EngineMissing(
                f"baseline={self._setup.baseline} needs xllamacpp and gguf; pip install 'pensieve-lab[llama-cpp]'."
            )

    def start(self) -> StartReport:
        self.check()
        began = perf_counter()
        file = gguf_file(self._setup, self._type)
        written = perf_counter()
        client = self._open(file)
        ready, per_token = perf_counter(), self._setup.model.kv_bytes_per_token
        slots = client.get("/slots") or []
        cells = self._fields["n_ctx"] if self._fields["kv_unified"] else sum(slot["n_ctx"] for slot in slots)
        host = self._fields["ram_cache_mib"] * 2**20
        settings = {
            "engine": "llama.cpp",
            "version": version("xllamacpp"),
            **{f"configured_{name}": value for name, value in self._fields.items()},
            "n_batch": self._fields["n_batch"],
            "max_batch_tokens": self._fields["n_batch"],
            "max_batch_requests": len(slots),
            "threads": self._fields["threads"],
            "n_parallel": len(slots),
            "n_ctx_slot": slots[0]["n_ctx"] if slots else None,
            "n_ctx": sum(slot["n_ctx"] for slot in slots),
            "wait_policy": os.environ.get("OMP_WAIT_POLICY"),
            "weights_file": str(file),
            "export_s": written - began,
            "gpu_tokens": cells,
            "gpu_bytes": cells * per_token,
            "cpu_tokens": host // per_token,
            "cpu_bytes": host,
            "kv_bytes_per_token": per_token,
            "dtype": self._setup.model.dtype,
        }
        return StartReport(ready - written, 0.0, settings)

    def answer(self, request: Request, channel: Channel) -> Reply:
        """See base. A Free output streams in any case, and ends where its end of sequence comes."""
        output = request.output
        streamed = replace(request, stream=request.stream or isinstance(output, Free))
        body = {
            "prompt": list(request.prompt),
            "n_predict": output.max_new_tokens,
            "temperature": 0.0,
            "cache_prompt": True,
            "stream": streamed.stream,
        }
        process, client = self._process, self._client
        assert process is not None and client is not None
        with while_it_serves(process, client.reachable), client.ask(PATH, body) as answer:
            return read_completion(answer, streamed, channel, tokens_in, self._setup.ends(request))

    def forget(self, session: str | None) -> None:
        raise ConfigError("llama.cpp has no way to empty its host-memory prompt cache; start it anew for a cold cache.")

    def identity(self) -> dict[str, str]:
        return {"packages": "xllamacpp"}

    def _open(self, file: Path) -> CompletionsClient:
        """Serve this file."""
        port = free_port()
        call = f"serve({str(file)!r}, {port}, {self._fields!r})"
        code = f"from pensieve.plugins.engines.llama_cpp import serve; {call}"
        self._process = process = EngineProcess.ours(self._setup.baseline, code)
        self._client = client = CompletionsClient(f"http://127.0.0.1:{port}")
        process.wait_until(client.healthy, self._timeout_s)
        return client

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._process is not None:
            self._process.close()


def params_of(file: Path, fields: Mapping[str, Any], port: int) -> Any:
    """xllamacpp's parameters; the names of the fields are those of the baselines."""
    import xllamacpp as x

    params = x.CommonParams()
    params.model.path = str(file)
    params.hostnames, params.port = ["127.0.0.1"], port
    params.n_ctx, params.n_batch, params.n_ubatch = fields["n_ctx"], fields["n_batch"], fields["n_batch"]
    params.n_parallel, params.kv_unified = fields["n_parallel"], fields["kv_unified"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = fields["threads"]
    wide, attention = fields["kv_type"] == "f32", x.llama_flash_attn_type
    params.cache_type_k = params.cache_type_v = x.ggml_type.GGML_TYPE_F32 if wide else x.ggml_type.GGML_TYPE_F16
    params.flash_attn_type = attention.LLAMA_FLASH_ATTN_TYPE_DISABLED if wide else attention.LLAMA_FLASH_ATTN_TYPE_AUTO
    params.n_gpu_layers, params.main_gpu = fields["n_gpu_layers"], fields["main_gpu"]
    params.split_mode = x.llama_split_mode.LLAMA_SPLIT_MODE_NONE
    params.no_op_offload = params.no_kv_offload = fields["n_gpu_layers"] == 0  # a CPU is not helped by a GPU beside it
    params.cache_ram_mib = fields["ram_cache_mib"]
    params.fit_params = False  # nothing is adjusted to the machine: what is asked for is run, or refused
    params.endpoint_slots, params.ui, params.offline = True, False, True
    return params


def serve(file: str, port: int, fields: Mapping[str, Any]) -> None:
    """A server of its own process, from the wheel of xllamacpp, until the process is ended."""
    import xllamacpp

    gpus = [one["name"] for one in xllamacpp.get_device_info() if "GPU" in one["type"].name]
    if fields["n_gpu_layers"] and len(gpus) <= fields["main_gpu"]:
        found = ", ".join(gpus) or "none"
        sys.exit(
            f"This build of xllamacpp serves on no GPU {fields['main_gpu']} (it finds {found}); install one that does."
        )
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # before it has threads, which inherit that
    server = xllamacpp.Server(params_of(Path(file), fields, port))
    signal.sigwait([signal.SIGTERM])
    del server
