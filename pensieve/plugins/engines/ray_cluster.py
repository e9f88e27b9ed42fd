"""A Ray of our own: started for a trial on the loopback interface, and gone with it, also after kill -9."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from pensieve.errors import EngineMissing
from pensieve.plugins.engines.process import EngineProcess, free_port

LOOPBACK = "127.0.0.2"
"""Ray takes 127.0.0.1 to mean the machine's outer address; every other address of the loopback network stays what it is."""

STORE_BYTES = 80_000_000  # requests and replies are small; 75 MB is the least that Ray takes
READY = "Ray runtime started"


def check_ray(asks: str) -> None:
    """Raises EngineMissing where Ray is not installed. asks: the option that needs it."""
    if importlib.util.find_spec("ray") is None:
        raise EngineMissing(f"{asks} needs Ray; install it with pip install 'pensieve-lab[ray]'.")


def ray_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("ray")
    except PackageNotFoundError:
        return "none"


class RayCluster:
    """One node and this process connected to it, from `start` until `close`. No dashboard, no usage report.

    Ray's processes are children of a guard (EngineProcess), which ends all of them with this process. Ray listens on every
    interface whatever address it is given, so each cluster has a token of its own, without which nobody is served.

    cpus: what tasks may ask for. killer: let Ray kill workers when the machine's memory is nearly full. environment: more
    of it, for all processes of the cluster and for this one while it is open.
    """

    def __init__(
        self,
        cpus: int,
        gpus: int = 0,
        *,
        killer: bool = True,
        start_timeout_s: float = 120.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._cpus, self._gpus, self._killer, self._timeout_s = cpus, gpus, killer, start_timeout_s
        self._environment = dict(environment or {})
        self._process: EngineProcess | None = None
        self._folder: Path | None = None
        self._open = ExitStack()

    def start(self) -> None:
        """A Ray that this process is connected to already serves, and is left as it is. Raises EngineFailed."""
        import ray

        _start_none_by_the_way()
        if ray.is_initialized():
            return
        self._folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short: its sockets' paths may not exceed 107 characters
        opened = (
            self._folder / "s"
        )  # Ray lets everybody read and write in the folder it gets, so that is inside of ours
        killer = {"RAY_memory_monitor_refresh_ms": "250" if self._killer else "0"}
        self._open.enter_context(own_environment({**killer, **self._environment}))
        address = f"{LOOPBACK}:{free_port()}"
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
        command += [
            f"--node-ip-address={LOOPBACK}",
            f"--port={address.rpartition(':')[2]}",
            "--include-dashboard=false",
        ]
        command += [f"--num-cpus={self._cpus}", f"--num-gpus={self._gpus}", f"--temp-dir={opened}"]
        command += [f"--object-store-memory={STORE_BYTES}", "--include-log-monitor=false"]
        self._process = process = EngineProcess("ray", command)
        process.wait_until(lambda: READY in process.log(), self._timeout_s)
        self._open.enter_context(_without_ray_notices())
        ray.init(address=address, _node_ip_address=LOOPBACK, log_to_driver=False, logging_level="ERROR")

    def close(self) -> None:
        """Safe after a start that failed, and twice."""
        if self._process is not None:
            import ray

            ray.shutdown()
            self._process.close()
            self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        self._open.close()

    def __enter__(self) -> RayCluster:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def own_environment(more: Mapping[str, str]) -> Iterator[None]:
    """The environment of a cluster and of its driver, this process, while the block runs: a token of its own, nothing
    reported, and our package to be found."""
    folder = str(Path(__file__).parents[3])
    own = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "PYTHONPATH": os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH")))),
        **more,
    }
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    _read_token_again()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _without_ray_notices() -> Iterator[None]:
    """Ray prints a paragraph on stdout for each process that has died, whatever it is told of logs. Who is killed here for
    want of memory, and who died, is told of in our own words."""
    from ray._private import worker

    worker._worker_logs_enabled, before = False, worker._worker_logs_enabled
    try:
        yield
    finally:
        worker._worker_logs_enabled = before


def _start_none_by_the_way() -> None:
    """A call of Ray in a process that is connected to none starts one, open to everybody and in nobody's care: what is left
    of a cluster in other threads would do so after its end."""
    from ray._private import auto_init_hook

    auto_init_hook.enable_auto_connect = False


def _read_token_again() -> None:
    """Ray reads mode and token once a process; this cluster's may not be its first."""
    from ray import _raylet

    compiled: Any = _raylet  # knows more than its stub
    with suppress(AttributeError):  # releases before tokens
        compiled.Config.initialize("")
        compiled.AuthenticationTokenLoader.instance().reset_cache()


def remote(target: Callable[..., Any] | type, **options: Any) -> Any:
    """`target` as an actor class or a task of Ray, with these options."""
    import ray

    return ray.remote(**options)(target)
