"""llama.cpp: its server in a process of its own, over the loopback interface.

It is the C++ server of xllamacpp, a wheel that needs no compiler. Prompts are token ids; see gguf_export for how replies
become ids again.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, Literal

from pensieve.core.plan import StartReport
from pensieve.core.request import Free, Request
from pensieve.errors import ConfigError, EngineMissing
from pensieve.plugins.engines.base import Channel, EngineSetup, OutsideEngine, Reply
from pensieve.plugins.engines.completions import CompletionsClient
from pensieve.plugins.engines.gguf_export import refuse_family, tokens_in
from pensieve.plugins.engines.openai_http import read_completion
from pensieve.plugins.engines.process import EngineProcess, free_port, while_it_serves
from pensieve.plugins.engines.weights import gguf_file
from pensieve.serve.systems.base import Capabilities
from pensieve.units import ceil_div

KvType = Literal["f32", "f16", "q8_0"]
KV_BYTES = {"f32": 4.0, "f16": 2.0, "q8_0": 34 / 32}  # a value; q8_0: 32 of them and a scale
MOST_SLOTS = 4
CELLS = 256
WAITING = 64  # requests that may wait in the server's own queue
ALL_LAYERS = 10_000  # more than any model has
EVERYTHING = 4  # of its levels of log
LOG_S, LOG_POLL_S = 0.3, 0.002  # its log is written by a thread of its own
IDLE = "all slots are idle"  # the last line of a start
PATH = "/v1/completions"
_REPORTED = re.compile(r"llama_context: (n_seq_max|n_ctx|n_ctx_seq|n_batch|n_ubatch|flash_attn|kv_unified)\s*= (\S+)")
_KV = re.compile(r"llama_kv_cache: size =\s*[\d.]+ MiB.*K \((\w+)\).*V \((\w+)\)")
_BUFFER = re.compile(r"(?:load_tensors|llama_kv_cache): +(\w+) (?:model|KV) buffer size")
_SYSTEM = re.compile(r"system_info: n_threads.*?\| (.*)")
_THREADS = re.compile(r"n_threads = (\d+) \(n_threads_batch = (\d+)\)")


class LlamaCpp(OutsideEngine):
    """n_ctx: cells of KV, divided among the slots; null: the KV budget. n_batch: prompt tokens an iteration; null:
    scheduler.max_batch_tokens. n_ubatch: of one forward; null: n_batch. n_parallel: slots; null: at most 4, no more than
    scheduler.max_batch_requests, and few enough to hold the longest conversation. kv_type, flash_attention: f32 without it
    gives the tokens that our engine gives. weights_type: of the exported file. kv_unified: slots share all cells instead.
    start_timeout_s: until it must be healthy. The KV of idle slots may take cache.cpu of host memory. All layers run on the
    GPU of hardware=, on a CPU none does.
    """

    def __init__(
        self,
        setup: EngineSetup,
        *,
        n_ctx: int | None = None,
        n_batch: int | None = None,
        n_ubatch: int | None = None,
        n_parallel: int | None = None,
        kv_type: KvType = "f32",
        flash_attention: bool = False,
        weights_type: Literal["f32", "f16"] = "f32",
        kv_unified: bool = False,
        slot_prompt_similarity: float = 0.1,
        start_timeout_s: float = 120.0,
    ) -> None:
        self.can = Capabilities()
        self.at_once = WAITING
        self._setup = setup
        each = ceil_div((setup.longest_tokens or 0) + setup.block_tokens, CELLS) * CELLS
        self._per_token = setup.model.kv_bytes_per_token / setup.model.dtype_bytes * KV_BYTES[kv_type]
        slots = n_parallel or max(1, min(MOST_SLOTS, setup.batch_requests, setup.kv_tokens // each))
        share = CELLS if kv_unified else CELLS * slots
        cells = n_ctx or max(share, setup.kv_tokens // share * share)  # a slot has a multiple of CELLS, rounded up
        batch = n_batch or setup.batch_tokens
        self._weights_type, self._timeout_s = weights_type, start_timeout_s
        self._process: EngineProcess | None = None
        self._client: CompletionsClient | None = None
        self._fields: dict[str, Any] = {
            "n_ctx": cells,
            "n_batch": batch,
            "n_ubatch": n_ubatch or batch,
            "n_parallel": slots,
            "threads": setup.threads,
            "kv_type": kv_type,
            "flash_attention": flash_attention,
            "n_gpu_layers": ALL_LAYERS * (setup.device != "cpu"),
            "main_gpu": int(setup.device.partition(":")[2] or 0),
            "ram_cache_mib": int(setup.host_tokens * self._per_token) // 2**20,
            "kv_unified": kv_unified,
            "slot_prompt_similarity": slot_prompt_similarity,
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
        file = gguf_file(self._setup, self._weights_type)
        written = perf_counter()
        ready, reported = self._open(file)
        self._refuse_device(reported.get("reported_devices"))
        slots = self._slots()
        settings = {
            "engine": "llama.cpp",
            **{f"configured_{name}": value for name, value in self._fields.items()},
            **reported,
            "n_batch": reported.get("reported_n_batch", self._fields["n_batch"]),
            "max_batch_tokens": reported.get("reported_n_ubatch", self._fields["n_ubatch"]),
            "max_batch_requests": len(slots) if slots else None,
            "threads": reported.get("reported_threads", self._fields["threads"]),
            "n_parallel": len(slots) if slots else None,
            "n_ctx_slot": slots[0]["n_ctx"] if slots else None,
            "n_ctx": sum(slot["n_ctx"] for slot in slots) if slots else None,
            "wait_policy": os.environ.get("OMP_WAIT_POLICY"),
            "weights_file": str(file),
            "export_s": written - began,
            **self._sizes(slots),
            "dtype": self._setup.model.dtype,
        }
        return StartReport(ready - written, 0.0, settings)

    def _refuse_device(self, gpus: str | None) -> None:
        """Raises EngineMissing where the engine put weights or KV elsewhere than the trial's device. gpus: those it reports;
        None: it reports none of its memory."""
        device = self._setup.device
        right = {"none", None} if device == "cpu" else {f"CUDA{self._fields['main_gpu']}"}
        if gpus not in right:
            ran = {None: "does not say where it runs", "none": "runs on the CPU"}.get(gpus, f"runs on {gpus}")
            raise EngineMissing(
                f"llama.cpp {ran}, and the trial is to run on {device}. Install a build of xllamacpp for that "
                "device, or choose the hardware that it runs on."
            )

    def _sizes(self, slots: list[dict[str, Any]]) -> dict[str, Any]:
        per_token = self._per_token
        cells = self._fields["n_ctx"] if self._fields["kv_unified"] else sum(slot["n_ctx"] for slot in slots)
        host = self._fields["ram_cache_mib"] * 2**20
        return {
            "gpu_tokens": cells,
            "gpu_bytes": int(cells * per_token),
            "cpu_tokens": int(host / per_token),
            "cpu_bytes": host,
            "kv_bytes_per_token": int(per_token),
        }

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

    def _open(self, file: Path) -> tuple[float, dict[str, Any]]:
        """Serve this file; returns since when (time.perf_counter), and what the engine says of itself."""
        port = free_port()
        call = f"serve({str(file)!r}, {port}, {self._fields!r})"
        code = f"from pensieve.plugins.engines.llama_cpp import serve; {call}"
        self._process = process = EngineProcess.ours(self._setup.baseline, code)
        self._client = client = CompletionsClient(f"http://127.0.0.1:{port}")
        process.wait_until(client.healthy, self._timeout_s)
        return perf_counter(), {"version": version("xllamacpp"), **reported(_whole(process.log))}

    def _slots(self) -> list[dict[str, Any]]:
        assert self._client is not None
        return self._client.get("/slots") or []

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._process is not None:
            self._process.close()


def params_of(file: Path, fields: Mapping[str, Any], port: int, verbosity: int = EVERYTHING) -> Any:
    """xllamacpp's parameters; the names of the fields are those of the baselines."""
    import xllamacpp as x

    params = x.CommonParams()
    params.model.path = str(file)
    params.hostnames, params.port = ["127.0.0.1"], port
    params.n_ctx, params.n_batch, params.n_ubatch = fields["n_ctx"], fields["n_batch"], fields["n_ubatch"]
    params.n_parallel, params.kv_unified = fields["n_parallel"], fields["kv_unified"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = fields["threads"]
    kinds = {"f32": x.ggml_type.GGML_TYPE_F32, "f16": x.ggml_type.GGML_TYPE_F16, "q8_0": x.ggml_type.GGML_TYPE_Q8_0}
    params.cache_type_k = params.cache_type_v = kinds[fields["kv_type"]]
    attention = x.llama_flash_attn_type
    params.flash_attn_type = (
        attention.LLAMA_FLASH_ATTN_TYPE_ENABLED
        if fields["flash_attention"]
        else attention.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )
    params.n_gpu_layers, params.main_gpu = fields["n_gpu_layers"], fields["main_gpu"]
    params.split_mode = x.llama_split_mode.LLAMA_SPLIT_MODE_NONE
    params.no_op_offload = params.no_kv_offload = fields["n_gpu_layers"] == 0  # a CPU is not helped by a GPU beside it
    params.cache_ram_mib = fields["ram_cache_mib"]
    params.slot_prompt_similarity = fields["slot_prompt_similarity"]
    params.fit_params = False  # nothing is adjusted to the machine: what is asked for is run, or refused
    params.endpoint_slots, params.ui, params.offline = True, False, True
    params.verbosity = verbosity
    return params


def serve(file: str, port: int, fields: Mapping[str, Any]) -> None:
    """A server of its own process, from the wheel of xllamacpp, until the process is ended."""
    import xllamacpp

    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # before it has threads, which inherit that
    server = xllamacpp.Server(params_of(Path(file), fields, port))
    signal.sigwait([signal.SIGTERM])
    del server


def reported(log: str) -> dict[str, Any]:
    """What the server's log says of its own context, and in `reported_devices` which GPUs hold weights or KV."""
    found: dict[str, Any] = {
        f"reported_{name}": int(value) if value.isdigit() else value for name, value in _REPORTED.findall(log)
    }
    if buffers := set(_BUFFER.findall(log)):
        found["reported_devices"] = ", ".join(sorted(name for name in buffers if name[-1].isdigit())) or "none"
    for k, v in _KV.findall(log)[:1]:
        found["reported_kv_type"] = k if k == v else f"{k}/{v}"
    for build in _SYSTEM.findall(log)[:1]:
        found["build"] = build.strip(" |")
    for threads, batch in _THREADS.findall(log)[:1]:
        found |= {"reported_threads": int(threads), "reported_threads_batch": int(batch)}
    return found


def _whole(said: Callable[[], str]) -> str:
    """The log of a server that serves, up to the last line of its start; what there is of it after LOG_S."""
    ends = perf_counter() + LOG_S
    while perf_counter() < ends and IDLE not in said():
        sleep(LOG_POLL_S)
    return said()
