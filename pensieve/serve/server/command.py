"""What the commands serve and chat share, and how serve runs: from a configuration to a warm server on a socket."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
import threading
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from pensieve.errors import ConfigError, PensieveError
from pensieve.lab.compose.conf import outputs_folder
from pensieve.lab.compose.model_files import model_identity
from pensieve.lab.compose.settings import ModelConfig, check_node, resolved
from pensieve.lab.trial.terminal import say
from pensieve.serve.server.api import Server, replicated_server, server_of
from pensieve.serve.server.app import App, ServeSettings, create_app
from pensieve.serve.server.gate import KEYS, tenants_of
from pensieve.serve.server.observers import Recording
from pensieve.serve.server.state import StateFile

_SWITCH_S = 0.0005  # how long a thread may hold the interpreter while another, the engine's or a client's, waits

_KEEP_ALIVE_S = 75
"""How long a connection may be idle. Clients built on httpx, OpenAI's own among them, use one again for up to 5 s; uvicorn's
default is as long, so that it closed some of them in the face of the next message."""

log = logging.getLogger(__name__)


def serve(config: Mapping[str, Any], _typed: Collection[str] = ()) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit status."""
    settings = check_node(ServeSettings, config, "serve")
    bound = bind(settings)  # before the model loads: a port that is taken is told at once
    state = App(settings, tenants_of(settings.host), str(config["model"]["name"]))
    sys.setswitchinterval(_SWITCH_S)
    http = uvicorn.Server(uvicorn_config(state))
    loading = threading.Thread(target=_load, args=(state, config, http), daemon=True)
    loading.start()
    http.run(sockets=[bound])
    loading.join()
    if state.failure is not None:
        raise ConfigError(state.failure)
    return 0


def bind(settings: ServeSettings) -> socket.socket:
    """The socket of host and port, which nobody is answered on yet. Raises ConfigError."""
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
        bound = socket.create_server(address, family=family, backlog=2048)
        # asyncio sets it for sockets of its own. Without it the first bytes of a reply wait 40 ms for an acknowledgement.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return bound
    except OSError as error:
        raise ConfigError(
            f"The server cannot listen on {settings.host}:{settings.port} ({error.strerror}); choose another port with "
            "serve.port=8001 (0: any that is free), or end the program that listens there."
        ) from error


class Connection(H11Protocol):
    """Uvicorn's over h11, which limits the bytes of headers. asyncio reads into a buffer of 256 KiB, of which a request
    leaves a few hundred bytes in use: each such hole is one in the heap. Here a long body comes in more reads."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if hasattr(transport, "max_size"):  # uvloop's has none
            made: Any = transport
            made.max_size = 16_384
        super().connection_made(transport)


def uvicorn_config(state: App) -> uvicorn.Config:
    settings = state.settings
    return uvicorn.Config(
        create_app(state),
        http=Connection,
        limit_concurrency=settings.max_connections,
        host=settings.host,
        port=settings.port,
        log_level="warning",
        access_log=False,
        proxy_headers=False,  # nobody asks whence a client came
        timeout_graceful_shutdown=max(1, round(settings.drain_s)),
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )


def _load(state: App, config: Mapping[str, Any], http: uvicorn.Server) -> None:
    """While /health says that the engine is loading. An error ends the server, or nobody would learn why it never gets
    ready; one that was stopped while it loaded has not failed."""
    with ExitStack() as opened:
        try:
            server = _open(state, config, opened)
        except Exception as error:
            if http.should_exit:
                log.info("Stopped while the engine was loading: %s", error)
                return
            if not isinstance(error, PensieveError):
                log.exception("The server cannot start.")
            state.failure = str(error) if isinstance(error, PensieveError) else f"The server cannot start: {error!r}."
            http.should_exit = True
            return
        state.on_close = opened.pop_all().close
    state.server = server
    port = http.servers[0].sockets[0].getsockname()[1] if getattr(http, "servers", ()) else state.settings.port
    address = f"http://{state.settings.host}:{port}/"
    say(f"{state.model} is ready at {address} (v1 API, /metrics, page). Ctrl-C stops it.")


def _open(state: App, config: Mapping[str, Any], opened: ExitStack) -> Server:
    """The engine, and what its turns are kept in. opened: closes all of it, the engine first."""
    settings = state.settings
    kept = open_state(settings, config)
    if kept is not None:
        opened.callback(kept.close)
    if settings.replicas > 1:
        without_keys = {KEYS: ""}  # the replicas know no clients
        server = replicated_server(config, settings.replicas, settings.router, without_keys)
    else:
        server = server_of(config, keeps_disk=kept is not None)
    behind = opened.enter_context(ExitStack())
    opened.callback(server.close)
    if settings.record:
        named = outputs_folder() / "traffic.parquet" if settings.record is True else settings.record
        recording = Recording(server, Path(named).expanduser(), config)
        behind.callback(recording.close)
        say(f"Turns are recorded to {recording.path}.")
    state.prepare(server, kept)
    if state.restored:
        say(f"{state.restored} conversations of before are known again.")
    # What there is now is here to stay: the cycle collector does not go through it again, which takes 0.1 s and more while
    # nobody is served. The last call counts what is not, which is nothing, or what requests leave would grow to a quarter.
    gc.collect()
    gc.freeze()
    gc.collect()
    return server


def open_state(settings: ServeSettings, config: Mapping[str, Any]) -> StateFile | None:
    """Where conversations are kept; None: nowhere. Raises ConfigError for a file that was asked for and cannot serve."""
    if settings.state is False or settings.state == "off":
        return None
    plain = resolved({"model": config["model"]})
    model = model_identity(ModelConfig.model_validate(plain["model"]), bool(config["hardware"]["simulated"]))
    if settings.state != "auto":
        return StateFile(Path(settings.state).expanduser(), model)
    try:
        return StateFile(outputs_folder() / "serve.db", model)
    except ConfigError as error:
        say(f"Conversations end with this server: {error}")
        return None
