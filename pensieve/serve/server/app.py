"""The server over HTTP: the API of OpenAI, responses that own their KV, sessions, and a page."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI, Header, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse

from pensieve import __version__
from pensieve.core.request import Free, Sampling
from pensieve.errors import ConfigError
from pensieve.serve.server import statistics
from pensieve.serve.server.api import Server
from pensieve.serve.server.conversations import LONGEST_NAME, session_name
from pensieve.serve.server.dialogue import Dialogue, Tools, Wish
from pensieve.serve.server.feed import ChatShape, CompletionShape, Feed
from pensieve.serve.server.gate import (
    SESSION_HEADER,
    BodyRoute,
    Gate,
    NotFound,
    Overloaded,
    answer_errors,
    documented,
    off_the_loop,
)
from pensieve.serve.server.responses import Responder, ResponseStore, Stored
from pensieve.serve.server.schemas import (
    ChatBody,
    CompletionBody,
    ResponseBody,
    TokenizeBody,
    client_stops,
    hint_of,
    tools_of,
)
from pensieve.serve.server.settings import OPERATOR, ServeSettings, Tenants
from pensieve.serve.server.state import StateFile
from pensieve.serve.server.statistics import Meters, session_body, session_line
from pensieve.serve.server.turn import Turn

log = logging.getLogger(__name__)

TRIM_SHARE = 0.001  # of the time may go to giving pages back: allocating threads may have to wait for that
SWEEP_S = 5.0  # how often conversations that nobody came back to are looked for


class App:
    """The state of one HTTP server. `server` is None until the engine is warm."""

    def __init__(self, settings: ServeSettings, tenants: Tenants, model: str) -> None:
        self.settings, self.tenants, self.model = settings, tenants, model
        self.server: Server | None = None
        self.failure: str | None = None
        self.dialogue: Dialogue
        self.responses: ResponseStore
        self.meters: Meters
        self.created = int(time.time())
        self.identity: str | None = None
        """A digest of all that decides how requests are served: configuration, code and platform."""
        self.on_close: list[Callable[[], None]] = []
        self.restored = 0
        """Conversations that were there before this server was started."""
        self.tidy: Callable[[], None] | None = None
        self.loop: Future[asyncio.AbstractEventLoop] = Future()
        """That serves, in the process's main thread."""

    def prepare(self, server: Server, state: StateFile | None = None) -> None:
        """All but the word that requests are served from now on (`ready`), with the conversations of before. state: where
        they are kept; raises ConfigError for one that cannot be read."""
        s = self.settings
        server.conversations.limit(s.max_sessions, s.max_stored_tokens, s.keep_alive_s)
        self.dialogue = Dialogue(server)
        self.responses = ResponseStore(server.conversations, self.settings.max_sessions)
        if state is not None:
            self.restored = state.restore(server.conversations, self.responses)
            self.tidy = state.tidy
            self.on_close.append(state.close)
        self.meters = Meters(server)
        server.observe(lambda turn, record: self.meters.turn_ended(record))

    def ready(self, server: Server) -> None:
        """From now on requests are served by this server, which is prepared."""
        self.server = server

    @property
    def warm(self) -> Server:
        """For requests that the gate has let in."""
        assert self.server is not None
        return self.server

    # -- a turn ---------------------------------------------------------------------------------------------------------

    def admit(self) -> Server:
        """Raises Overloaded: who is turned away costs nothing, and those who are served are served in time."""
        if self.warm.under_way >= self.settings.max_queue:
            self.meters.shed()
            raise Overloaded(f"{self.settings.max_queue} turns are under way, which is all there may be; try again.")
        return self.warm


def create_app(state: App) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        state.loop.set_result(asyncio.get_running_loop())
        sweeping = asyncio.ensure_future(_sweep(state))
        yield
        sweeping.cancel()
        for close in state.on_close:
            close()

    app = FastAPI(title="Pensieve", version="0.1.0", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.max_body_bytes = state.settings.max_body_bytes
    app.add_middleware(Gate, state=state)
    answer_errors(app)
    _add_routes(app, state)
    return app


async def _sweep(state: App) -> None:
    trim_at = 0.0
    while True:
        await asyncio.sleep(SWEEP_S)
        if state.server is not None:
            await asyncio.to_thread(state.server.conversations.expire)
            if state.tidy is not None:
                await asyncio.to_thread(state.tidy)
            if time.monotonic() >= trim_at:
                began = time.monotonic()
                await asyncio.to_thread(statistics.give_back)
                trim_at = time.monotonic() + (time.monotonic() - began) / TRIM_SHARE


Session = Annotated[str | None, Header(alias=SESSION_HEADER, max_length=LONGEST_NAME)]


def _add_routes(app: FastAPI, state: App) -> None:
    async def served(
        request: Request,
        body: ChatBody | CompletionBody | ResponseBody,
        reply: CompletionShape | Responder,
        begin: Callable[[Wish], Turn],
        max_tokens: int | None,
        stops: tuple[str, ...],
        tools: Tools | None = None,
        ignore_eos: bool = False,
    ) -> Response:
        """What came of the turn that `begin` begins, streamed or whole, in the form of `reply`."""
        _check_model(state, body.model)
        feed = Feed(state.admit(), stops, reply.tells_ids)
        default = _default_sampling(state)
        sampling = Sampling(
            default.temperature if body.temperature is None else body.temperature,
            default.top_p if body.top_p is None else body.top_p,
            seed=random.getrandbits(31) if body.seed is None else body.seed,
            anonymous=body.seed is not None,  # equal seeds and prompts draw equal tokens
        )
        most = state.settings.max_new_tokens if max_tokens is None else max_tokens
        listening = {"on_event": feed.on_event if body.stream else None, "on_end": feed.on_end}
        wish = Wish(
            Free(most, stops, ignore_eos=ignore_eos),
            sampling,
            fits=max_tokens is None,
            keep_alive_s=body.keep_alive,
            tools=tools,
            options={**listening, "hint": hint_of(body.metadata)},
        )
        feed.started(await off_the_loop(request, partial(begin, wish)))
        name = feed.turn.conversation.id
        headers = {SESSION_HEADER: name} if name.isascii() and name.isprintable() else {}
        if body.stream:
            return await feed.sent(request, reply.events(feed), headers)
        return JSONResponse(reply.whole(await feed.whole(request), feed), headers=headers)

    async def chat(request: Request, body: ChatBody, x_session_id: Session = None) -> Response:
        name, whole = _session_of(body, x_session_id), None if body.history is None else body.history == "whole"
        messages = [message.plain() for message in body.messages]
        return await served(
            request,
            body,
            ChatShape("chatcmpl", state.model, body),
            partial(state.dialogue.chat, _tenant(request), name, messages, whole),
            body.max_completion_tokens or body.max_tokens,
            state.dialogue.stops(client_stops(body.stop)),
            tools=tools_of(body.tools),
        )

    async def completions(request: Request, body: CompletionBody, x_session_id: Session = None) -> Response:
        name, whole = _session_of(body, x_session_id), body.history == "whole"
        prompt: Any = body.prompt  # one, as its field has seen to
        return await served(
            request,
            body,
            CompletionShape("cmpl", state.model, body),
            partial(state.dialogue.complete, _tenant(request), name, prompt, whole),
            body.max_tokens,
            client_stops(body.stop),
            ignore_eos=bool(body.ignore_eos),
        )

    async def respond(request: Request, body: ResponseBody) -> Response:
        tenant, tools = _tenant(request), tools_of(body.tools)
        previous = None if body.previous_response_id is None else _stored(state, tenant, body.previous_response_id)
        responder = Responder(body, state.model, tenant, tools, state.responses)
        begin = partial(responder.begin, state.dialogue, previous)
        stops = state.dialogue.stops(())
        return await served(request, body, responder, begin, body.max_output_tokens, stops, tools=tools)

    async def tokenize(request: Request, body: TokenizeBody) -> Response:
        _check_model(state, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ConfigError("Give either prompt or messages.")

        def ids() -> list[int]:
            if body.messages is not None:
                return state.dialogue.template.prompt([message.plain() for message in body.messages]).ids
            assert body.prompt is not None
            return [*state.warm.tokenizer.begin, *state.warm.tokenizer.encode(body.prompt)]

        tokens = await asyncio.to_thread(ids)
        return JSONResponse({"count": len(tokens), "max_model_len": state.warm.most_tokens, "tokens": tokens})

    for path, endpoint in (
        ("/v1/chat/completions", chat),
        ("/v1/completions", completions),
        ("/v1/responses", respond),
        ("/tokenize", tokenize),
    ):
        app.router.add_api_route(
            path, endpoint, methods=["POST"], responses=documented(404), route_class_override=BodyRoute
        )

    @app.post("/v1/responses/compact", include_in_schema=False)
    async def compact() -> Response:
        raise NotFound("Responses are not compacted here: a conversation keeps all that was said.")

    @app.get("/v1/responses/{response_id}", responses=documented(404))
    async def get_response(request: Request, response_id: str) -> Response:
        return JSONResponse(_stored(state, _tenant(request), response_id).body)

    @app.delete("/v1/responses/{response_id}", responses=documented(404))
    async def delete_response(request: Request, response_id: str) -> Response:
        if not state.responses.delete(_tenant(request), response_id):
            raise NotFound(f"There is no response {response_id!r}.")
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @app.get("/v1/models", responses=documented())
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_card(state)]})

    @app.get("/v1/models/{model}", responses=documented(404))
    async def model(model: str) -> Response:
        _check_model(state, model)
        return JSONResponse(_card(state))

    @app.get("/v1/sessions", responses=documented())
    async def sessions(request: Request) -> Response:
        server = state.warm
        known = sorted(server.conversations.of(_tenant(request)), key=lambda one: -one.used_at)
        lines = await asyncio.to_thread(lambda: [session_line(server, one) for one in known])  # replicas are asked
        return JSONResponse({"object": "list", "data": lines})

    @app.get("/v1/sessions/{session_id:path}", responses=documented(404))
    async def session(request: Request, session_id: str) -> Response:
        known = state.warm.conversations.find(_tenant(request), session_name(session_id))
        if known is None:
            raise NotFound(f"There is no session {session_id!r}.")
        return JSONResponse(await asyncio.to_thread(session_body, state.warm, known))

    @app.delete("/v1/sessions/{session_id:path}", responses=documented(404))
    async def delete_session(request: Request, session_id: str) -> Response:
        if not await asyncio.to_thread(state.warm.end_session, _tenant(request), session_name(session_id)):
            raise NotFound(f"There is no session {session_id!r}.")
        return JSONResponse({"id": session_id, "object": "session", "deleted": True})

    @app.get("/health", responses={503: {"description": "Not ready, or the engine failed"}})
    async def health() -> Response:
        if state.server is None:
            return JSONResponse({"status": state.failure or "loading"}, status_code=503)
        return JSONResponse({"status": "ok", "model": state.model})

    @app.get("/version", responses=documented())
    async def version() -> Response:
        return JSONResponse({"version": __version__, "identity": state.identity})

    @app.get("/metrics", responses=documented(404))
    async def metrics(request: Request) -> Response:
        if state.tenants.required and _tenant(request) != OPERATOR:
            raise NotFound(f"Only the key of the tenant {OPERATOR!r} may read the metrics of all.")
        text = await asyncio.to_thread(state.meters.text)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    if state.settings.page:
        html = files("pensieve.serve.server").joinpath("page.html").read_text(encoding="utf-8")

        @app.get("/", include_in_schema=False)
        async def page() -> Response:
            return HTMLResponse(html, headers={"Content-Security-Policy": _POLICY, "X-Frame-Options": "DENY"})


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


# -- plumbing -----------------------------------------------------------------------------------------------------------


def _tenant(request: Request) -> str:
    tenant: str = request.scope["pensieve.tenant"]
    return tenant


def _session_of(body: ChatBody | CompletionBody, header: str | None) -> str | None:
    """The session's name, where the client gives one; of two the body's."""
    return header if body.session_id is None else body.session_id


def _stored(state: App, tenant: str, response_id: str) -> Stored:
    stored = state.responses.find(tenant, response_id)
    if stored is None:
        raise NotFound(f"There is no response {response_id!r}.")
    return stored


def _check_model(state: App, name: str | None) -> None:
    if name not in (None, state.model):
        raise NotFound(f"There is no model {name!r} here; this server has {state.model!r}.")


def _card(state: App) -> dict[str, Any]:
    return {
        "id": state.model,
        "object": "model",
        "created": state.created,
        "owned_by": "pensieve",
        "max_model_len": state.warm.most_tokens,
        "temperature": _default_sampling(state).temperature,
        "top_p": _default_sampling(state).top_p,
    }


def _default_sampling(state: App) -> Sampling:
    """Of clients that do not say."""
    return state.warm.sampling(state.settings.temperature, None)
