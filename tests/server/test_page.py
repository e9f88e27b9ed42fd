"""The page at /: one file that asks nobody else, drawn by a real browser."""

import html
import re
import shutil
import subprocess
from importlib.resources import files
from typing import Any

import pytest

pytest.importorskip("fastapi")

from tests.server.live import SIMULATED, serving, simulated

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PAGE = files("pensieve.serve.server").joinpath("page.html").read_text(encoding="utf-8")


def test_it_is_one_file_that_may_load_and_ask_this_server_only() -> None:
    assert not re.findall(r"""(?:src|href)\s*=|https?://|@import|url\(""", PAGE)
    assert "innerHTML" not in PAGE, "what clients say is text, never markup"
    with simulated() as (_, client):
        reply = client.get("/")
        assert reply.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in reply.headers["content-security-policy"]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
def test_a_browser_shows_conversations_their_chunks_and_a_streamed_reply() -> None:
    from pensieve.serve.server import create_server

    def shown(address: str) -> str:
        command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000"]
        ran: Any = subprocess.run([*command, "--dump-dom", address], capture_output=True, text=True, timeout=100)
        return str(ran.stdout)

    fields = {**SIMULATED, "gpu_cache": "640 tokens", "cpu_cache": "320 tokens"}
    with create_server(**fields) as server, serving(server) as (_, url):
        for turn in range(3):
            for name in ("<b>alice</b>", "bob", "carol", "dave"):
                server.generate(name, text=f"message {turn} " * 12, max_new_tokens=8, ignore_eos=True)
        page = shown(f"{url}/?session=bob")
        assert re.search(r'<input id="temperature"[^>]* value="0"', page), "the server's default stands in its field"
        kv = server.system.places("bob")
        drawn = re.search(rf'aria-label="{len(kv)} chunks: {kv}">((?:<i class="[GBC-]"></i>)+)', page)
        assert drawn is not None and drawn[1].count("<i") == len(kv)
        assert "evicted by" in page
        assert "&lt;b&gt;alice" in page and "<b>alice" not in page
        server.generate("erin", text="once", max_new_tokens=2, ignore_eos=True)
        said = shown(f"{url}/?say=Hello")
        assert ">1 turn, " in said and ">3 turns, " in said
        [mine] = [one for one in server.conversations if one.id.startswith("page-")]
    reply = mine.messages[-1]["content"]
    text = re.search(r'<p class="you">Hello</p><p>([^<]*)', said)
    assert text is not None and html.unescape(text[1]).strip()[:1] in reply
