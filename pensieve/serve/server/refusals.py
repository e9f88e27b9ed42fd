"""What is refused, over HTTP: which status and which sentence an error becomes."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from pensieve.errors import (
    CapacityError,
    ConfigError,
    ContextLengthError,
    PensieveError,
    RequestRefused,
    TooManySessions,
)
from pensieve.serve.server.schemas import error_body


class NotFound(PensieveError):
    """There is no such thing, or it is another tenant's."""


class Overloaded(PensieveError):
    """As many turns are under way as there may be."""


def documented(*codes: int) -> dict[int | str, dict[str, Any]]:
    """The error statuses that an operation documents."""
    meanings = {
        400: "It makes no sense",
        401: "No key",
        404: "There is no such thing",
        413: "Too large",
        429: "Try later",
    }
    meanings |= {503: "Not ready, or the engine failed", 403: "Not this way", 422: "It makes no sense", 409: "Busy"}
    return {code: {"description": meanings[code]} for code in (400, 401, 403, 413, 429, 503, *codes)}


def answer_errors(app: FastAPI) -> None:
    """From now on they are answers of this app."""
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(PensieveError, _refused)
    app.add_exception_handler(HTTPException, _http)


_CODES: dict[type[Exception], str] = {
    ContextLengthError: "context_length_exceeded",
    CapacityError: "capacity_exceeded",
}


def _refused(_: Request, error: Exception) -> Response:
    status, kind, code = 503, "server_error", None
    headers = {}
    if isinstance(error, ConfigError | RequestRefused):
        status, kind = 400, "invalid_request_error"
        code = _CODES.get(type(error))
    elif isinstance(error, NotFound):
        status, kind, code = 404, "not_found_error", "not_found"
    elif isinstance(error, Overloaded | TooManySessions):
        status, kind, code, headers = 429, "rate_limit_error", "overloaded", {"Retry-After": "1"}
    return JSONResponse(error_body(str(error), kind, code), status_code=status, headers=headers)


def _invalid(_: Request, error: Exception) -> Response:
    """The first thing that is wrong, without what was sent: it may be anything."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first.get("loc", ())[1:])
    message = f"{where}: {first['msg']}" if where else str(first["msg"])
    clean = message.encode("utf-8", "replace").decode()
    return JSONResponse(error_body(clean, "invalid_request_error", "invalid", where or None), status_code=400)


def _http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    return JSONResponse(error_body(str(error.detail), kind), status_code=error.status_code, headers=error.headers)
