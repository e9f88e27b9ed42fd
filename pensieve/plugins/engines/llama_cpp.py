"""llama.cpp: its server inside this process, called without HTTP, or in a process of its own, over HTTP.

Both are the same C++ server (xllamacpp, a wheel that needs no compiler; or a llama-server binary by its path), so what
differs between the two baselines is the way to it. Prompts are token ids; see gguf_export for how replies become ids again.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import sys
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, Literal

from pensieve.core.plan import StartReport
from pensieve.core.request import Free, Request, TokenArray, tokens_of
from pensieve.errors import ConfigError, EngineFailed, EngineMissing
from pensieve.lab.results.digest import content_hash
from pensieve.plugins.engines.base import Channel, EngineSetup, OutsideEngine, Reply
from pensieve.plugins.engines.completions import CompletionsClient, error_of
from pensieve.plugins.engines.gguf_export import refuse_family, tokens_in
from pensieve.plugins.engines.process import LOG_LINES, EngineProcess, free_port, while_it_serves
from pensieve.plugins.engines.weights import gguf_file
from pensieve.serve.systems.base import Capabilities
from pensieve.units import ceil_div, parse_capacity

KvType = Literal["f32", "f16", "q8_0"]
KV_BYTES = {"f32": 4.0, "f16": 2.0, "q8_0": 34 / 32}  # a value; q8_0: 32 of them and a scale
MOST_SLOTS = 4
CELLS = 256
WAITING = 64  # requests that may wait in the server's own queue
ALL_LAYERS = 10_000  # more than any model has
SILENT, EVERYTHING = 0, 4  # its levels of log
LOG_S, LOG_POLL_S = 0.3, 0.002  # its log is written by a thread of its own
IDLE = "all slots are idle"  # the last line of a start
PATH = "/v1/completions"
_REPORTED = re.compile(r"llama_context: (n_seq_max|n_ctx|n_ctx_seq|n_batch|n_ubatch|flash_attn|kv_unified)\s*= (\S+)")
_KV = re.compile(r"llama_kv_cache: size =\s*[\d.]+ MiB.*K \((\w+)\).*V \((\w+)\)")
_BUFFER = re.compile(r"(?:load_tensors|llama_kv_cache): +(\w+) (?:model|KV) buffer size")
_THREADS = re.compile(r"n_threads = (\d+) \(n_threads_batch = (\d+)\)")


class _LlamaCpp(OutsideEngine):
    """Fields of both baselines.

    n_ctx: cells of KV, divided among the slots; null: the KV budget. n_batch: prompt tokens an iteration; null:
    scheduler.max_batch_tokens. n_ubatch: of one forward; null: n_batch. n_parallel: slots; null: at most 4, no more than
    scheduler.max_batch_requests, and few enough to hold the longest conversation. kv_type, flash_attention: f32 without it
    gives the tokens that our engine gives. ram_cache: host memory for the KV of idle slots, "1GiB" or "8192 tokens"; null:
    cache.cpu. n_gpu_layers: those that run on hardware's GPU; null: all, on a CPU none. weights_type: of the exported file.
    gguf_path: a file that is run in place of the model's own weights. kv_unified: slots share all cells instead. server_path:
    of llama_cpp_http, a llama-server binary; null: the one in xllamacpp. start_timeout_s: until that must be healthy.
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
        n_gpu_layers: int | None = None,
        ram_cache: str | None = None,
        weights_type: Literal["f32", "f16"] = "f32",
        gguf_path: str | None = None,
        kv_unified: bool = False,
        slot_prompt_similarity: float = 0.1,
        server_path: str | None = None,
        start_timeout_s: float = 120.0,
    ) -> None:
        self.can = Capabilities()
        self.at_once = WAITING
        self._setup = setup
        each = ceil_div((setup.longest_tokens or 0) + setup.block_tokens, CELLS) * CELLS
        self._per_token = setup.model.kv_bytes_per_token / setup.model.dtype_bytes * KV_BYTES[kv_type]
        host = setup.host_tokens
        if ram_cache is not None:
            host = parse_capacity(ram_cache, "baseline.engine.ram_cache").in_tokens(int(self._per_token))
        slots = n_parallel or max(1, min(MOST_SLOTS, setup.batch_requests, setup.kv_tokens // each))
        share = CELLS if kv_unified else CELLS * slots
        cells = n_ctx or max(share, setup.kv_tokens // share * share)  # a slot has a multiple of CELLS, rounded up
        batch = n_batch or setup.batch_tokens
        self._gguf_path, self._weights_type = gguf_path, weights_type
        self._server_path, self._timeout_s = server_path, start_timeout_s
        self._fields: dict[str, Any] = {
            "n_ctx": cells,
            "n_batch": batch,
            "n_ubatch": n_ubatch or batch,
            "n_parallel": slots,
            "threads": setup.threads,
            "kv_type": kv_type,
            "flash_attention": flash_attention,
            "n_gpu_layers": n_gpu_layers if n_gpu_layers is not None else ALL_LAYERS * (setup.device != "cpu"),
            "main_gpu": int(setup.device.partition(":")[2] or 0),
            "ram_cache_mib": int(host * self._per_token) // 2**20,
            "kv_unified": kv_unified,
            "slot_prompt_similarity": slot_prompt_similarity,
        }

    def check(self) -> None:
        layers, device = self._fields["n_gpu_layers"], self._setup.device
        if (layers == 0) != (device == "cpu"):
            raise ConfigError(
                f"baseline.engine.n_gpu_layers={layers} does not run on {device}, the device of hardware=; leave it null, or "
                "choose the hardware that it runs on."
            )
        if self._gguf_path is None:
            refuse_family(self._setup.model.name, self._setup.model.architecture)
        elif not Path(self._gguf_path).expanduser().is_file():
            raise ConfigError(f"baseline.engine.gguf_path={self._gguf_path} is not a file; name a GGUF file.")
        if find_spec("gguf") is None or (self._needs_wheel() and find_spec("xllamacpp") is None):
            raise EngineMissing(
                f"baseline={self._setup.baseline} needs xllamacpp and gguf; pip install 'pensieve-lab[llama-cpp]'."
            )

    def start(self) -> StartReport:
        self.check()
        began = perf_counter()
        file = gguf_file(self._setup, self._weights_type, self._gguf_path)
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
            "dtype": self._setup.model.dtype if self._gguf_path is None else "gguf",
        }
        return StartReport(ready - written, 0.0, settings)

    def _refuse_device(self, gpus: str | None) -> None:
        """Raises EngineMissing where the engine put weights or KV elsewhere than the trial's device. gpus: those it reports;
        None: it reports none of its memory."""
        device = self._setup.device
        if gpus != ("none" if device == "cpu" else f"CUDA{self._fields['main_gpu']}") and (gpus, device) != (
            None,
            "cpu",
        ):
            ran = {None: "does not say where it runs", "none": "runs on the CPU"}.get(gpus, f"runs on {gpus}")
            raise EngineMissing(
                f"llama.cpp {ran}, and the trial is to run on {device}. Install a build for that device (or name it in "
                "baseline.engine.server_path), or choose the hardware that it runs on."
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
        """A Free output streams in any case, and ends where its end of sequence comes."""
        output = request.output
        body = {
            "prompt": list(request.prompt),
            "n_predict": output.max_new_tokens,
            "temperature": 0.0,
            "cache_prompt": True,
            "stream": request.stream or isinstance(output, Free),
        }
        reading = _Reading(channel, self._setup.ends(request), bool(body["stream"]))
        sent, received = self._ask(body, reading)
        return reading.reply(sent, received)

    def forget(self, session: str | None) -> None:
        raise ConfigError("llama.cpp has no way to empty its host-memory prompt cache; start it anew for a cold cache.")

    def _needs_wheel(self) -> bool:
        return True

    @abstractmethod
    def _open(self, file: Path) -> tuple[float, dict[str, Any]]:
        """Serve this file; returns since when (time.perf_counter), and what the engine says of itself."""

    @abstractmethod
    def _slots(self) -> list[dict[str, Any]]:
        """The server's own list of its slots."""

    @abstractmethod
    def _ask(self, body: dict[str, Any], reading: _Reading) -> tuple[int | None, int | None]:
        """Hand the pieces of the answer to `reading` until it wants no more; returns bytes sent and received."""


class LlamaCpp(_LlamaCpp):
    """llama.cpp inside this process. Its server listens on a loopback port too, which is asked for the slots alone."""

    _server: Any = None

    def check(self) -> None:
        super().check()
        if self._server_path is not None:
            raise ConfigError(
                "baseline.engine.server_path is of baseline=llama_cpp_http; this one runs in this process."
            )

    def identity(self) -> dict[str, str]:
        return {"packages": "xllamacpp"}

    def _open(self, file: Path) -> tuple[float, dict[str, Any]]:
        import xllamacpp

        silence = _silencer(xllamacpp)
        params = params_of(file, self._fields, port=0, verbosity=SILENT if silence is None else EVERYTHING)
        with _stderr_read() as said:
            try:
                self._server = xllamacpp.Server(params)
            except RuntimeError as error:
                if silence is not None:  # else it has no log to wait for
                    sleep(LOG_S)
                    silence(SILENT)
                last = [line for line in said().splitlines() if line.strip()][-LOG_LINES:]
                raise EngineFailed("\n".join([f"llama.cpp did not start ({error})", *last])) from error
            ready = perf_counter()
            if silence is None:
                log = said()
            else:
                log = _whole(said)
                silence(SILENT)
        build = str(xllamacpp.get_system_info()).strip()
        return ready, {"version": xllamacpp.__version__, "build": build, **reported(log)}

    def _slots(self) -> list[dict[str, Any]]:
        client = CompletionsClient(self._server.listening_address)
        try:
            return client.get("/slots") or []
        finally:
            client.close()

    def _ask(self, body: dict[str, Any], reading: _Reading) -> tuple[int | None, int | None]:
        server = self._server
        if server is None:
            raise EngineFailed("llama.cpp was closed.")
        if body["stream"]:
            server.handle_completions(body, lambda piece: not reading.take(piece))  # True ends the request
        else:
            reading.take(server.handle_completions(body))
        return None, None

    def close(self) -> None:
        self._server = None  # its destructor ends its threads


class LlamaCppHttp(_LlamaCpp):
    """llama.cpp's server in a process of its own, over HTTP."""

    _process: EngineProcess | None = None
    _client: CompletionsClient | None = None

    def check(self) -> None:
        super().check()
        if self._server_path is not None and not Path(self._server_path).expanduser().is_file():
            raise EngineMissing(
                f"baseline.engine.server_path={self._server_path} is not there; name a llama-server binary."
            )

    def identity(self) -> dict[str, str]:
        if self._server_path is None:
            return {"packages": "xllamacpp"}
        return {"server": content_hash(Path(self._server_path).expanduser())[:12]}

    def _needs_wheel(self) -> bool:
        return self._server_path is None

    def _open(self, file: Path) -> tuple[float, dict[str, Any]]:
        port = free_port()
        if self._server_path is None:
            call = f"serve({str(file)!r}, {port}, {self._fields!r})"
            code = f"from pensieve.plugins.engines.llama_cpp import serve; {call}"
            self._process = EngineProcess.ours(self._setup.baseline, code)
        else:
            self._process = EngineProcess(self._setup.baseline, self._command(self._server_path, file, port))
        self._client = client = CompletionsClient(f"http://127.0.0.1:{port}")
        self._process.wait_until(client.healthy, self._timeout_s)
        return perf_counter(), reported(_whole(self._process.log))

    def _command(self, server: str, file: Path, port: int) -> list[str]:
        f = self._fields
        flags = {
            "--model": file, "--host": "127.0.0.1", "--port": port, "--ctx-size": f["n_ctx"],
            "--batch-size": f["n_batch"], "--ubatch-size": f["n_ubatch"], "--parallel": f["n_parallel"],
            "--threads": f["threads"], "--threads-batch": f["threads"], "--cache-type-k": f["kv_type"],
            "--cache-type-v": f["kv_type"], "--flash-attn": "on" if f["flash_attention"] else "off",
            "--n-gpu-layers": f["n_gpu_layers"], "--main-gpu": f["main_gpu"], "--split-mode": "none",
            "--cache-ram": f["ram_cache_mib"], "--slot-prompt-similarity": f["slot_prompt_similarity"],
            "--log-verbosity": EVERYTHING,
        }  # fmt: skip
        switches = ["--slots", "--no-webui", *(["--kv-unified"] if f["kv_unified"] else [])]
        switches += [] if f["n_gpu_layers"] else ["--no-op-offload", "--no-kv-offload"]
        options = [str(part) for pair in flags.items() for part in pair]
        return [str(Path(server).expanduser()), *options, *switches]

    def _slots(self) -> list[dict[str, Any]]:
        assert self._client is not None
        return self._client.get("/slots") or []

    def _ask(self, body: dict[str, Any], reading: _Reading) -> tuple[int | None, int | None]:
        assert self._client is not None and self._process is not None
        client = self._client
        with while_it_serves(self._process, client.reachable), client.ask(PATH, body) as answer:
            for piece in answer.pieces():
                if not reading.take(piece):
                    break
            return answer.sent_bytes, answer.received_bytes

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._process is not None:
            self._process.close()


class _Reading:
    """The pieces of one answer as they come: tokens to the channel, and what the last piece says of the whole."""

    def __init__(self, channel: Channel, eos: frozenset[int], streamed: bool) -> None:
        self._channel, self._eos, self._streamed = channel, eos, streamed
        self._tokens: list[int] = []
        self._finish: str | None = None
        self._cached: int | None = None
        self._compute_ms: float | None = None

    def take(self, piece: Mapping[str, Any]) -> bool:
        """Whether more is wanted. Raises RequestRefused, RequestFailed where the piece is an error; a callback of the
        engine must not raise, so an error is kept until `reply`."""
        if "error" in piece:
            self._error = error_of(piece["error"], int(piece["error"].get("code", 500)))
            return False
        wanted = True
        for choice in piece.get("choices", ()):
            for token in tokens_in(choice["text"]):
                if not wanted:
                    break
                wanted = self._take(token)
            if choice.get("finish_reason"):
                self._finish = self._finish or str(choice["finish_reason"])
        usage, timings = piece.get("usage") or {}, piece.get("timings") or {}
        details = usage.get("prompt_tokens_details") or {}
        self._cached = details.get("cached_tokens", self._cached)
        if "prompt_ms" in timings:
            self._compute_ms = timings["prompt_ms"] + timings["predicted_ms"]
        return wanted

    _error: Exception | None = None

    def _take(self, token: int) -> bool:
        if not self._streamed:
            self._tokens.append(token)
            return True
        told = self._channel.tell(token)
        if token in self._eos:
            self._finish = "eos"
            return False
        return told

    def reply(self, sent: int | None, received: int | None) -> Reply:
        if self._error is not None:
            raise self._error
        whole: TokenArray[int] | None = None if self._streamed else tokens_of(self._tokens)
        return Reply(
            self._finish,
            tokens=whole,
            cached_tokens=self._cached,
            compute_ms=self._compute_ms,
            sent_bytes=sent,
            received_bytes=received,
        )


def params_of(file: Path, fields: Mapping[str, Any], port: int, verbosity: int) -> Any:
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
    server = xllamacpp.Server(params_of(Path(file), fields, port, EVERYTHING))
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
    for threads, batch in _THREADS.findall(log)[:1]:
        found |= {"reported_threads": int(threads), "reported_threads_batch": int(batch)}
    return found


def _whole(said: Callable[[], str]) -> str:
    """The log of a server that serves, up to the last line of its start; what there is of it after LOG_S."""
    ends = perf_counter() + LOG_S
    while perf_counter() < ends and IDLE not in said():
        sleep(LOG_POLL_S)
    return said()


@contextmanager
def _stderr_read() -> Iterator[Callable[[], str]]:
    """What C code writes to standard error while the block runs: a function that returns it so far. A block that raises
    shows it there after all."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        descriptor = file.fileno()
        os.dup2(descriptor, 2)
        try:
            yield lambda: os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode("utf-8", errors="replace")
        except BaseException:
            file.seek(0)
            with os.fdopen(os.dup(kept), "wb") as shown:
                shutil.copyfileobj(file, shown)
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def _silencer(xllamacpp: Any) -> Callable[[int], object] | None:
    """What sets how much the server in this process logs once it runs, a function of its library that the wheel has no name
    for; None where this build has none: its log is not read then, as it could not be ended again."""
    name = "_Z30common_log_set_verbosity_tholdi"  # common_log_set_verbosity_thold(int)
    return getattr(ctypes.CDLL(xllamacpp.xllamacpp.__file__), name, None)
