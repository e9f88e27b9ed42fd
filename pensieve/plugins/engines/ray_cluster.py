"""A Ray of our own: started for a trial on the loopback interface, and gone with it, also after kill -9."""

from __future__ import annotations

import importlib.util
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pensieve.errors import EngineMissing
from pensieve.plugins.engines.process import EngineProcess, free_port

LOOPBACK = "127.0.0.2"
"""Ray takes 127.0.0.1 to mean the machine's outer address; every other address of the loopback network stays what it is."""

STORE_BYTES = 80_000_000  # requests and replies are small; 75 MB is the least that Ray takes
START_S = 120.0
READY = "Ray runtime started"


def check_ray(asks: str) -> None:
    """Raises EngineMissing where Ray is not installed. asks: the option that needs it."""
    if importlib.util.find_spec("ray") is None:
        raise EngineMissing(f"{asks} needs Ray; install it with pip install 'pensieve-lab[ray]'.")


def ray_version() -> str:
    try:
        return version("ray")
    except PackageNotFoundError:
        return "none"


@contextmanager
def ray_cluster(
    cpus: int, gpus: int = 0, *, killer: bool = True, environment: Mapping[str, str] | None = None
) -> Iterator[None]:
    """One node and this process connected to it, while the block runs. No dashboard, no usage report. A Ray that this process
    is connected to already serves, and is left as it is.

    Ray's processes are children of a guard (EngineProcess): by itself Ray leaves two behind for a minute after kill -9. Ray
    listens on every interface whatever address it is given, so each cluster has a token of its own, without which nobody is
    served.

    cpus: what tasks may ask for. killer: let Ray kill workers when the machine's memory is nearly full. environment: more
    of it, for all processes of the cluster and for this one while it is open. Raises EngineFailed.
    """
    import ray
    from ray._private import auto_init_hook, worker

    # A call in a process that is connected to none would start a Ray, open to everybody and in nobody's care.
    auto_init_hook.enable_auto_connect = False
    # Ray prints a paragraph for each process that has died. Who died is told of in our own words.
    worker._worker_logs_enabled = False
    if ray.is_initialized():
        yield
        return
    with ExitStack() as opened:
        # Short: its sockets' paths may not exceed 107 characters. Ray lets everybody read and write in what is inside of it.
        folder = opened.enter_context(TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True))
        killing = {"RAY_memory_monitor_refresh_ms": "250" if killer else "0"}
        opened.enter_context(own_environment({**killing, **(environment or {})}))
        port = free_port()
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
        command += [f"--node-ip-address={LOOPBACK}", f"--port={port}", "--include-dashboard=false"]
        command += [f"--num-cpus={cpus}", f"--num-gpus={gpus}", f"--temp-dir={folder}/s"]
        command += [f"--object-store-memory={STORE_BYTES}", "--include-log-monitor=false"]
        process = opened.enter_context(closing(EngineProcess("ray", command)))
        process.wait_until(lambda: READY in process.log(), START_S)
        ray.init(f"{LOOPBACK}:{port}", _node_ip_address=LOOPBACK, log_to_driver=False, logging_level="ERROR")
        opened.callback(ray.shutdown)
        yield


@contextmanager
def own_environment(more: Mapping[str, str]) -> Iterator[None]:
    """The environment of a cluster and of its driver, this process, while the block runs: a token of its own, nothing
    reported, and our package to be found."""
    from ray import _raylet

    own = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")))),
        **more,
    }
    before = dict(os.environ)
    os.environ.update(own)
    compiled: Any = _raylet  # knows more than its stub
    with suppress(
        AttributeError
    ):  # it has read mode and token once, for another cluster; releases before tokens have not
        compiled.Config.initialize("")
        compiled.AuthenticationTokenLoader.instance().reset_cache()
    try:
        yield
    finally:
        for name in own:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if name in own})
