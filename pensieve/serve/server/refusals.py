"""What is refused, over HTTP: which status and which sentence an error becomes."""

from __future__ import annotations

from http import HTTPStatus
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


class NoKey(PensieveError):
    """Nobody's key, or none."""


class NotThisWay(PensieveError):
    """A client that this server is not for."""


class NotReady(PensieveError):
    """The engine is loading, or has failed to."""


class NotFound(PensieveError):
    """There is no such thing, or it is another tenant's."""


class Overloaded(PensieveError):
    """As many turns are under way as there may be."""


_ANSWERS: dict[type[PensieveError], tuple[int, str, str | None, dict[str, str]]] = {
    ContextLengthError: (400, "invalid_request_error", "context_length_exceeded", {}),
    CapacityError: (400, "invalid_request_error", "capacity_exceeded", {}),
    RequestRefused: (400, "invalid_request_error", None, {}),
    ConfigError: (400, "invalid_request_error", None, {}),
    NoKey: (401, "authentication_error", None, {"WWW-Authenticate": "Bearer"}),
    NotThisWay: (403, "permission_error", None, {}),
    NotFound: (404, "not_found_error", "not_found", {}),
    Overloaded: (429, "rate_limit_error", "overloaded", {"Retry-After": "1"}),
    TooManySessions: (429, "rate_limit_error", "overloaded", {"Retry-After": "1"}),
    NotReady: (503, "server_error", "loading", {"Retry-After": "2"}),
    PensieveError: (503, "server_error", None, {}),
}
"""Status, kind, code and headers; of the first that an error is."""


def documented(*codes: int) -> dict[int | str, dict[str, Any]]:
    """The error statuses that an operation documents."""
    return {code: {"description": HTTPStatus(code).phrase} for code in (400, 401, 403, 413, 429, 503, *codes)}


def answer_errors(app: FastAPI) -> None:
    """From now on they are answers of this app."""
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(PensieveError, refused)
    app.add_exception_handler(HTTPException, _http)


def refused(_: object, error: Exception) -> Response:
    status, kind, code, headers = next(answer for known, answer in _ANSWERS.items() if isinstance(error, known))
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
