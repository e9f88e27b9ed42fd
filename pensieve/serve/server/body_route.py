"""A route whose whole input is one JSON body, read in one go: what is on the way to a first token is as short as can be."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar, get_type_hints

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import request_response

SESSION_HEADER = "X-Session-Id"
CLOSED = 499  # as nginx logs it; nobody receives it
_INLINE_BYTES = 16_384
T = TypeVar("T")


class BodyRoute(APIRoute):
    """Its endpoint takes `request`, `body` (a pydantic model) and, where it names it, `x_session_id`. The document describes
    it as any other route; FastAPI's way from a request to its arguments, with two exit stacks and a resolution of
    dependencies, would cost a third of the CPU time that passes before a turn begins."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **fields: Any) -> None:
        super().__init__(path, endpoint, **fields)
        self.app = request_response(self.get_route_handler())

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint: Callable[..., Coroutine[Any, Any, Response]] = self.endpoint
        model: type[BaseModel] = get_type_hints(endpoint)["body"]
        named = "x_session_id" in inspect.signature(endpoint).parameters

        async def handle(request: Request) -> Response:
            sent, kind = await _whole(request), request.headers.get("content-type", "")
            body = await off_the_loop(request, partial(read_body, model, sent, kind))
            return await (
                endpoint(request, body, request.headers.get(SESSION_HEADER)) if named else endpoint(request, body)
            )

        return handle


async def _whole(request: Request) -> bytes:
    """The body. Raises HTTPException where it is larger than a client may send, or its client leaves before its end."""
    limit, sent = request.app.state.max_body_bytes, bytearray()
    try:
        async for part in request.stream():
            sent += part
            if len(sent) > limit:
                raise HTTPException(413, f"The body is larger than {limit} bytes.", {"Connection": "close"})
    except ClientDisconnect:
        raise HTTPException(CLOSED) from None
    request.scope["pensieve.body_bytes"] = len(sent)
    return bytes(sent)


async def off_the_loop(request: Request, call: Callable[[], T]) -> T:
    """What `call` makes of a request's body; of a long one in another thread, so that other clients do not wait."""
    if int(request.scope["pensieve.body_bytes"]) < _INLINE_BYTES:
        return call()
    return await asyncio.to_thread(call)


def read_body(model: type[BaseModel], sent: bytes, content_type: str) -> BaseModel:
    """Raises RequestValidationError: also for a body of another type, which a page from elsewhere may send unasked."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise _invalid("The body is JSON; send it as Content-Type: application/json.")
    try:
        given = from_json(sent, allow_inf_nan=False)
    except ValueError as error:
        raise _invalid(f"The body is no JSON: {error}.") from None
    try:
        return model.model_validate(given)
    except ValidationError as error:
        told = error.errors(include_url=False, include_context=False, include_input=False)
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in told]) from None


def _invalid(sentence: str) -> RequestValidationError:
    return RequestValidationError([{"type": "body", "loc": ("body",), "msg": sentence}])
