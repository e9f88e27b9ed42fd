"""llama.cpp: its server in a process of its own, over the loopback interface.

It is the C++ server of xllamacpp, a wheel that needs no compiler. Prompts are token ids; see weights.py for how replies
become ids again.
"""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from time import perf_counter
from typing import Any

from pensieve.core.plan import StartReport
from pensieve.errors import EngineMissing
from pensieve.plugins.engines.base import EngineSetup
from pensieve.plugins.engines.openai_http import HttpEngine
from pensieve.plugins.engines.process import EngineProcess, free_port
from pensieve.plugins.engines.weights import gguf_file, refuse_family, tokens_in
from pensieve.units import ceil_div

MOST_SLOTS = 4
CELLS = 256
ALL_LAYERS = 10_000  # more than any model has


class LlamaCpp(HttpEngine):
    """n_parallel: slots, among which the cells of cache.gpu are divided; null: at most 4, no more than
    scheduler.max_batch_requests, and few enough to hold the longest conversation. kv_unified: slots share all cells instead.
    start_timeout_s: until it must be healthy.

    A model in float32 has its weights and KV in f32, and no flash attention: so it gives the tokens that our engine gives.
    One in 16 bits has both in f16, and flash attention where the server thinks fit. The KV of idle slots may take cache.cpu
    of host memory. All layers run on the GPU of hardware=, on a CPU none does.
    """

    at_once = 64  # requests that may wait in the server's own queue
    stops = False  # the file names no end of sequence

    def __init__(
        self,
        setup: EngineSetup,
        *,
        n_parallel: int | None = None,
        kv_unified: bool = False,
        start_timeout_s: float = 120.0,
    ) -> None:
        super().__init__(setup, start_timeout_s)
        each = ceil_div((setup.longest_tokens or 0) + setup.block_tokens, CELLS) * CELLS
        slots = n_parallel or max(1, min(MOST_SLOTS, setup.batch_requests, setup.kv_tokens // each))
        share = CELLS if kv_unified else CELLS * slots
        self._fields: dict[str, Any] = {
            "n_ctx": max(share, setup.kv_tokens // share * share),  # a slot has a multiple of CELLS, rounded up
            "n_batch": setup.batch_tokens,
            "n_parallel": slots,
            "threads": setup.threads,
            "kv_type": "f32" if setup.model.dtype == "float32" else "f16",
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

    def identity(self) -> dict[str, str]:
        return {"packages": "xllamacpp"}

    def start(self) -> StartReport:
        self.check()
        fields, began = self._fields, perf_counter()
        file = gguf_file(self._setup, fields["kv_type"])
        written, port = perf_counter(), free_port()
        code = f"from pensieve.plugins.engines.llama_cpp import serve; serve({str(file)!r}, {port}, {fields!r})"
        self._serve(EngineProcess.ours(self._setup.baseline, code), port)
        ready = perf_counter()
        cells = [slot["n_ctx"] for slot in self._get("/slots")]
        host_tokens = fields["ram_cache_mib"] * 2**20 // self._setup.model.kv_bytes_per_token
        settings = {
            "engine": "llama.cpp",
            "version": version("xllamacpp"),
            **{f"configured_{name}": value for name, value in fields.items()},
            "n_batch": fields["n_batch"],
            "max_batch_tokens": fields["n_batch"],
            "max_batch_requests": len(cells),
            "threads": fields["threads"],
            "n_parallel": len(cells),
            "n_ctx_slot": cells[0] if cells else None,
            "n_ctx": sum(cells),
            "wait_policy": os.environ.get("OMP_WAIT_POLICY"),
            "weights_file": str(file),
            "export_s": written - began,
            **self._setup.kv_settings(fields["n_ctx"] if fields["kv_unified"] else sum(cells), host_tokens),
        }
        return StartReport(ready - written, 0.0, settings)

    def _encode(self, text: str) -> Sequence[int]:
        return tokens_in(text)


def serve(file: str, port: int, fields: Mapping[str, Any]) -> None:
    """A server of its own process, until that is ended. fields: of xllamacpp's parameters, by the names of the baseline."""
    import xllamacpp as x

    gpus = [one["name"] for one in x.get_device_info() if "GPU" in one["type"].name]
    if fields["n_gpu_layers"] and len(gpus) <= fields["main_gpu"]:
        found = ", ".join(gpus) or "none"
        sys.exit(
            f"This build of xllamacpp serves on no GPU {fields['main_gpu']} (it finds {found}); install one that does."
        )
    params = x.CommonParams()
    params.model.path = file
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
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # before it has threads, which inherit that
    server = x.Server(params)
    signal.sigwait([signal.SIGTERM])
    del server
