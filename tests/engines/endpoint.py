"""A server of the OpenAI protocol that is written down here."""

from __future__ import annotations

import json
import threading
from array import array
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pensieve.core.session import common_prefix


class Endpoint(ThreadingHTTPServer):
    """Answers with `pieces`, or, where it `caches`, with tokens of its own and what of the prompt it was asked before, by
    whomever; remembers what it was asked.

    drops: the connection, in the middle of a stream: "early", before the length it had named, or "silently"; "at once",
    before it answers. reports: says in its usage what was cached. pages: further ones that it has.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.pieces: list[dict[str, Any]] = []
        self.status = 200
        self.drops = ""
        self.listing: tuple[int, dict[str, Any]] = 200, {"data": [{"id": "served"}]}
        self.pages: dict[str, dict[str, Any]] = {}
        self.caches, self.reports = False, True
        self._held: list[array[int]] = []
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def answer(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        if not self.caches:
            return self.pieces
        asked = array("i", body["prompt"])
        found = max((common_prefix(asked, held) for held in self._held), default=0)
        said = [(len(asked) + place) % 7 for place in range(body["max_tokens"])]
        self._held.append(asked + array("i", said))
        usage = {"prompt_tokens": len(asked), "prompt_tokens_details": {"cached_tokens": min(found, len(asked) - 1)}}
        choice = {"text": "", "token_ids": said, "finish_reason": "length"}
        return [{"choices": [choice], **({"usage": usage} if self.reports else {})}]


class Handler(BaseHTTPRequestHandler):
    server: Endpoint
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        status, content = self.server.listing
        if self.path != "/v1/models":
            content = self.server.pages.get(self.path, {})
            status = 200 if content else 404
        self.close_connection = True
        self._json(content, status)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server = self.server
        server.asked.append((self.path, body, {name.lower(): value for name, value in self.headers.items()}))
        if server.drops == "at once":
            self.close_connection = True
        elif server.status != 200:
            self._json(server.pieces[0], server.status)
        elif not body["stream"]:
            self._json(server.answer(body)[-1])
        else:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            if server.drops == "early":
                self.send_header("content-length", "100000")
            self.end_headers()
            for piece in server.answer(body):
                self.wfile.write(f"data: {json.dumps(piece)}\n\n".encode())
            if not server.drops:
                self.wfile.write(b"data: [DONE]\n\n")
            self.close_connection = True

    def _json(self, content: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        if self.close_connection:
            self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(data)
