"""The server over HTTP: the API of OpenAI, responses that own their KV, sessions, a page; and the command that runs it."""

import asyncio
import gc
import logging
import random
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
import uvicorn
from fastapi import FastAPI, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from pensieve import __version__
from pensieve.core.request import Free, Sampling
from pensieve.errors import ConfigError, PensieveError
from pensieve.lab.compose.conf import outputs_folder
from pensieve.lab.compose.model_files import ModelConfig, model_identity
from pensieve.lab.compose.settings import check_node, resolved
from pensieve.lab.trial.terminal import say
from pensieve.serve.server.api import Server, Turn, server_of
from pensieve.serve.server.conversations import LONGEST_NAME, Conversation, Stored, session_name
from pensieve.serve.server.gate import KEYS, OPERATOR, SESSION_HEADER, Gate, StrictRoute, digest, refused, tenants_of
from pensieve.serve.server.observers import Meters, Recording
from pensieve.serve.server.replies import (
    ChatReply,
    CompletionReply,
    ResponseReply,
    session_body,
    session_line,
)
from pensieve.serve.server.schemas import (
    ChatBody,
    CompletionBody,
    ResponseBody,
    TokenizeBody,
    Tools,
    hint_of,
    tools_of,
)
from pensieve.serve.server.state import StateFile

log = logging.getLogger(__name__)

SWEEP_S = 5.0  # how often conversations that nobody came back to are looked for
_SWITCH_S = 0.0005  # how long a thread may hold the interpreter while another, the engine's or a client's, waits
_KEEP_ALIVE_S = 75
"""How long a connection may be idle. Clients built on httpx, OpenAI's own among them, use one again for up to 5 s; uvicorn's
default is as long, so that it closed some of them in the face of the next message."""

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class ServeSettings(BaseModel):
    """The node `serve` of conf/serve.yaml. temperature: see Server.sampling.

    max_*: limits of each tenant; max_queue and max_connections are of all together. record: the file of recorded traffic;
    true: traffic.parquet in the outputs folder. state: where conversations outlive the server: auto (in the outputs folder,
    if no other server keeps its own there), off, or a file. replicas: one is in this process, several are a process each;
    router: which of them serves a turn.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    max_new_tokens: Positive = 512
    temperature: Annotated[float, Field(ge=0)] | None = None
    max_body_bytes: Positive = 4_000_000
    max_connections: Positive = 512
    max_queue: Positive = 256
    max_sessions: Positive = 10_000
    keep_alive_s: Seconds | None = 86_400.0
    drain_s: Seconds = 30.0
    state: str | Literal[False] = "off"
    record: str | bool = False
    replicas: Positive = 1
    router: Literal["affinity", "least_loaded", "prefix_aware", "random"] = "affinity"


class App:
    """The state of one HTTP server. `server` is None until the engine is warm."""

    def __init__(self, settings: ServeSettings, tenants: Mapping[str, str], model: str) -> None:
        """tenants: by their keys; none: there is one tenant, and no key is asked for."""
        self.settings, self.model = settings, model
        self.tenants = {digest(key): tenant for key, tenant in tenants.items()}
        self.server: Server | None = None
        self.failure: str | None = None
        self.meters: Meters
        self.created = int(time.time())
        self.on_close: Callable[[], None] | None = None
        self.restored = 0
        """Conversations that were there before this server was started."""
        self._kept: StateFile | None = None

    def prepare(self, server: Server, state: StateFile | None = None) -> None:
        """All but the word that requests are served from now on (`server`), with the conversations of before. state: where
        they are kept."""
        s = self.settings
        server.conversations.most, server.conversations.keep_alive_s = s.max_sessions, s.keep_alive_s
        self.meters = Meters(server)
        self._kept, self.restored = state, 0 if state is None else state.restore(server.conversations)

    def sweep(self) -> None:
        """Give up conversations that nobody came back to, and what else grows: the write-ahead log, and the C library's heap,
        which is else as large as the most that long bodies and prompts ever needed."""
        if self.server is not None:
            self.server.conversations.expire()
            if self._kept is not None:
                self._kept.tidy()
            if hasattr(psutil, "heap_trim"):
                psutil.heap_trim()

    @property
    def warm(self) -> Server:
        """For requests that the gate has let in."""
        assert self.server is not None
        return self.server

    def turn(
        self,
        body: ChatBody | CompletionBody | ResponseBody,
        max_tokens: int | None,
        stops: tuple[str, ...],
        tools: Tools | None = None,
        ignore_eos: bool = False,
    ) -> Turn:
        """What a client asks for. Raises HTTPException: who is turned away costs nothing, and those who are served are served
        in time."""
        self.check_model(body.model)
        server, most = self.warm, self.settings.max_queue
        if server.under_way >= most:
            self.meters.shed.inc()
            raise HTTPException(429, f"{most} turns are under way, which is all there may be; try again.")
        default = self.sampling
        sampling = Sampling(
            default.temperature if body.temperature is None else body.temperature,
            default.top_p if body.top_p is None else body.top_p,
            seed=random.getrandbits(31) if body.seed is None else body.seed,
            anonymous=body.seed is not None,  # equal seeds and prompts draw equal tokens
        )
        output = Free(max_tokens or self.settings.max_new_tokens, stops, ignore_eos=ignore_eos)
        told = {"hint": hint_of(body.metadata), "keep_alive_s": body.keep_alive}
        return server.turn(output, sampling, tools=tools, fits=max_tokens is None, **told)

    @property
    def sampling(self) -> Sampling:
        """Of clients that do not say."""
        return self.warm.sampling(self.settings.temperature, None)

    def check_model(self, name: str | None) -> None:
        if name not in (None, self.model):
            raise HTTPException(404, f"There is no model {name!r} here; this server has {self.model!r}.")

    def stored(self, tenant: str, response_id: str) -> tuple[Conversation, Stored]:
        stored = self.warm.conversations.response(tenant, response_id)
        if stored is None:
            raise HTTPException(404, f"There is no response {response_id!r}.")
        return stored


Session = Annotated[str | None, Header(alias=SESSION_HEADER, max_length=LONGEST_NAME)]


def create_app(state: App) -> FastAPI:
    async def sweep() -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await asyncio.to_thread(state.sweep)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        sweeping = asyncio.ensure_future(sweep())
        yield
        sweeping.cancel()
        if state.on_close is not None:
            state.on_close()

    app = FastAPI(title="Pensieve", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.router.route_class = StrictRoute
    app.add_middleware(Gate, state=state)
    for error in (PensieveError, HTTPException, RequestValidationError):
        app.add_exception_handler(error, refused)

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatBody, x_session_id: Session = None) -> Response:
        most, tools = body.max_completion_tokens or body.max_tokens, tools_of(body.tools)
        turn = state.turn(body, most, state.warm.stops(body.stops), tools)
        name, whole = body.session_id or x_session_id, None if body.history is None else body.history == "whole"
        messages = [message.plain() for message in body.messages]
        begin = partial(state.warm.conversations.chat, turn, _tenant(request), name, messages, whole)
        return await ChatReply(turn, body, state.model).answer(request, begin)

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionBody, x_session_id: Session = None) -> Response:
        turn = state.turn(body, body.max_tokens, body.stops, ignore_eos=bool(body.ignore_eos))
        name, whole = body.session_id or x_session_id, body.history == "whole"
        begin = partial(state.warm.conversations.complete, turn, _tenant(request), name, body.prompt, whole)
        return await CompletionReply(turn, body, state.model).answer(request, begin)

    @app.post("/v1/responses")
    async def respond(request: Request, body: ResponseBody) -> Response:
        tenant, previous = _tenant(request), body.previous_response_id
        stored = None if previous is None else state.stored(tenant, previous)
        turn = state.turn(body, body.max_output_tokens, state.warm.stops(()), tools_of(body.tools))
        reply = ResponseReply(turn, body, state.model)
        return await reply.answer(request, partial(reply.begin, tenant, stored))

    @app.post("/tokenize")
    async def tokenize(request: Request, body: TokenizeBody) -> Response:
        state.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ConfigError("Give either prompt or messages.")

        def ids() -> list[int]:
            if body.messages is not None:
                return state.warm.template.prompt([message.plain() for message in body.messages])
            assert body.prompt is not None
            return [*state.warm.tokenizer.begin, *state.warm.tokenizer.encode(body.prompt)]

        tokens = await asyncio.to_thread(ids)
        return JSONResponse({"count": len(tokens), "max_model_len": state.warm.most_tokens, "tokens": tokens})

    @app.get("/v1/responses/{response_id}")
    async def get_response(request: Request, response_id: str) -> Response:
        return JSONResponse(state.stored(_tenant(request), response_id)[1].body)

    @app.delete("/v1/responses/{response_id}")
    async def delete_response(request: Request, response_id: str) -> Response:
        if not state.warm.conversations.unstore(_tenant(request), response_id):
            raise HTTPException(404, f"There is no response {response_id!r}.")
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    def card() -> dict[str, Any]:
        drawn = {"temperature": state.sampling.temperature, "top_p": state.sampling.top_p}
        most = {"max_model_len": state.warm.most_tokens}
        return {"id": state.model, "object": "model", "created": state.created, "owned_by": "pensieve", **most, **drawn}

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [card()]})

    @app.get("/v1/models/{model}")
    async def model(model: str) -> Response:
        state.check_model(model)
        return JSONResponse(card())

    @app.get("/v1/sessions")
    async def sessions(request: Request) -> Response:
        server = state.warm
        known = sorted(server.conversations.of(_tenant(request)), key=lambda one: -one.used_at)
        lines = await asyncio.to_thread(lambda: [session_line(server, one) for one in known])  # replicas are asked
        return JSONResponse({"object": "list", "data": lines})

    @app.get("/v1/sessions/{session_id:path}")
    async def session(request: Request, session_id: str) -> Response:
        known = state.warm.conversations.find(_tenant(request), session_name(session_id))
        if known is None:
            raise HTTPException(404, f"There is no session {session_id!r}.")
        return JSONResponse(await asyncio.to_thread(session_body, state.warm, known))

    @app.delete("/v1/sessions/{session_id:path}")
    async def delete_session(request: Request, session_id: str) -> Response:
        if not await asyncio.to_thread(state.warm.end_session, _tenant(request), session_name(session_id)):
            raise HTTPException(404, f"There is no session {session_id!r}.")
        return JSONResponse({"id": session_id, "object": "session", "deleted": True})

    @app.get("/health")
    async def health() -> Response:
        if state.server is None:
            return JSONResponse({"status": state.failure or "loading"}, status_code=503)
        return JSONResponse({"status": "ok", "model": state.model})

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        if state.tenants and _tenant(request) != OPERATOR:
            raise HTTPException(404, f"Only the key of the tenant {OPERATOR!r} may read the metrics of all.")
        text = await asyncio.to_thread(state.meters.text)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    html = files("pensieve.serve.server").joinpath("page.html").read_text(encoding="utf-8")

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(html, headers={"Content-Security-Policy": _POLICY, "X-Frame-Options": "DENY"})

    return app


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


def _tenant(request: Request) -> str:
    tenant: str = request.scope["pensieve.tenant"]
    return tenant


# -- the command --------------------------------------------------------------------------------------------------------


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


def uvicorn_config(state: App) -> uvicorn.Config:
    settings = state.settings
    return uvicorn.Config(
        create_app(state),
        http="h11",  # which limits the bytes of headers
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
    without_keys = {KEYS: ""}  # the replicas know no clients
    server = server_of(config, kept is not None, settings.replicas, settings.router, without_keys)
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
