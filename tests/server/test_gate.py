"""Bodies that are read in one go are refused and documented as FastAPI's own are."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

pytest.importorskip("fastapi")
from pensieve.serve.server import gate
from pensieve.serve.server.app import App, ServeSettings, create_app
from pensieve.serve.server.gate import BadBody, Tenants, read_body
from pensieve.serve.server.schemas import ResponseBody
from tests.server.live import simulated

JSON = "application/json"


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
@pytest.mark.parametrize(
    "sent",
    [
        b'{"metadata": {"a": NUMBER}}',
        b'{"tool_choice": [NUMBER]}',
        b'{"tools": [{"type": "function", "function": {"a": NUMBER}}]}',
        b'{"tools": [{"type": "function", "name": "f", "parameters": {"a": NUMBER}}]}',
    ],
)
def test_no_number_without_a_json_form_comes_in_where_anything_may_stand(sent: bytes, number: bytes) -> None:
    """A response tells its metadata again, which no JSON could."""
    with pytest.raises(BadBody):
        read_body(ResponseBody, sent.replace(b"NUMBER", number), JSON)


def test_the_document_describes_body_and_header() -> None:
    document = create_app(App(ServeSettings(), Tenants(), "tiny")).openapi()
    for path, kind in (
        ("chat/completions", "ChatBody"),
        ("completions", "CompletionBody"),
        ("responses", "ResponseBody"),
    ):
        told = document["paths"][f"/v1/{path}"]["post"]
        assert told["requestBody"]["content"][JSON]["schema"]["$ref"] == f"#/components/schemas/{kind}"
        assert kind in document["components"]["schemas"]
        named = [one["name"] for one in told.get("parameters", ())]
        assert named == ([] if path == "responses" else ["X-Session-Id"])
        assert {"400", "404", "413", "429", "503"} <= set(told["responses"])


NULLS = [None] * 50_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("v1/completions", {"prompt": NULLS}),
        ("v1/completions", {"prompt": [NULLS]}),
        ("v1/completions", {"prompt": "x", "stop": NULLS}),
        ("v1/chat/completions", {"messages": NULLS}),
        ("v1/chat/completions", {"messages": [{"role": "user", "content": NULLS}]}),
        ("v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": NULLS}),
        ("v1/responses", {"input": NULLS}),
        ("tokenize", {"messages": NULLS}),
    ],
)
def test_a_long_body_is_read_off_the_loop_and_has_few_errors(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[threading.Thread] = []

    def watched(*sent: Any) -> Any:
        read.append(threading.current_thread())
        return read_body(*sent)

    monkeypatch.setattr(gate, "read_body", watched)
    with simulated() as (state, client):
        assert client.post(f"/{path}", json=body).status_code == 400
        [thread] = read
        assert thread.ident != asyncio.run_coroutine_threadsafe(_ident(), state.loop.result()).result()


async def _ident() -> int:
    return threading.get_ident()
