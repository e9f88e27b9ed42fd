"""pensieve record as a command: a recording ends, is killed, or meets a full disk."""

import logging
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")
import httpx

from pensieve.lab.traffic.journal import Journal, finish
from pensieve.lab.traffic.table import Exchange, Facts, read, read_facts
from pensieve.lab.workload.formats import load
from tests.server.live import simulated
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def recording(upstream, out):
    """The proxy's process, and its address."""
    command = [sys.executable, "runners/record.py", "--upstream", upstream, "--out", str(out), "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            line = process.stdout.readline()
            yield process, line.split(" at ")[1].split(";")[0]
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def chat(client, *said, **more):
    body = {"messages": [{"role": ("user", "assistant")[place % 2], "content": one} for place, one in enumerate(said)]}
    answer = client.post("/v1/chat/completions", json={**body, "max_tokens": 12, **more}, headers={"x-session-id": "s"})
    return answer.json()["choices"][0]["message"]["content"]


def test_conversations_with_our_server_are_recorded_and_replayed(tmp_path):
    out = tmp_path / "traffic.parquet"
    with simulated() as (_, direct), recording(str(direct.base_url).rstrip("/"), out) as (process, url):
        with httpx.Client(base_url=url, timeout=60) as client:
            said = ["Tell me of it. " * 20]
            for _ in range(3):
                said += [chat(client, *said), "And then? " * 20]
            assert client.get("/health").status_code == 200
            assert client.post("/v1/completions", json={"prompt": 1.5}).status_code == 400
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    facts, rows = read_facts(out), list(read(out))
    assert (facts.source, facts.unit, facts.complete, facts.lost) == ("proxy", "bytes", True, {})
    assert [row.status for row in rows] == ["completed"] * 3 + ["failed"]
    assert rows[0].cached_tokens == 0 < rows[1].cached_tokens < rows[2].cached_tokens, "as the server said"
    [conversation] = load(out).conversations
    assert [call.content.tokens for call in conversation.calls] == [row.prompt_tokens for row in rows[:3]]
    assert b"Tell" not in out.read_bytes() and list(tmp_path.iterdir()) == [out]


def committed(out):
    """How many completed requests the journal has. The writing process makes it, once it runs."""
    with (
        suppress(sqlite3.OperationalError),
        closing(sqlite3.connect(f"file:{out}.journal?mode=ro", uri=True)) as journal,
    ):
        return journal.execute("select count(*) from row where json like '%completed%'").fetchone()[0]


def test_what_is_older_than_a_second_outlives_kill_9(tmp_path):
    out = tmp_path / "traffic.parquet"
    with simulated() as (_, direct), recording(str(direct.base_url).rstrip("/"), out) as (process, url):
        with httpx.Client(base_url=url, timeout=60) as client:
            chat(client, "one")
            chat(client, "two")
        assert until(lambda: committed(out) == 2)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)
    assert finish(out) == out
    assert [row.status for row in read(out)] == ["completed"] * 2 and not read_facts(out).complete


def test_an_open_request_stays_as_unfinished_and_a_later_recording_takes_another_name(tmp_path):
    out = tmp_path / "traffic.parquet"
    first = Journal(out, Facts("proxy", unit="bytes", block=64))
    first.put(Exchange(1, 5.0, prompt_bytes=400, prompt_tokens=100, blocks=[-1, 2]))
    first.commit()
    first.put(Exchange(0, 4.0, status="completed", prompt_bytes=100, prompt_tokens=20))
    first.commit()
    first._file.close()  # killed
    second = Journal(out, Facts("proxy"))
    assert [(row.request, row.status) for row in read(out)] == [(0, "completed"), (1, "unfinished")]
    assert read_facts(out).tokens_per_byte == 120 / 500 and not read_facts(out).complete
    assert second.close() == tmp_path / "traffic-2.parquet" and read_facts(second.path).complete


def test_a_full_disk_ends_the_recording_and_raises_nothing(tmp_path, caplog):
    journal = Journal(tmp_path / "traffic.parquet", Facts("proxy", block=16))
    journal.put(Exchange(0, 0.0, status="completed"))
    journal.commit()
    [pages] = journal._file.execute("pragma page_count").fetchone()
    journal._file.execute(f"pragma max_page_count = {pages}")  # SQLite's own error of a full disk
    with caplog.at_level(logging.ERROR):
        for request in range(1, 4):
            journal.put(Exchange(request, 1.0, status="completed", blocks=list(range(20_000))))
            journal.commit()
    assert len(caplog.records) == 1 and "full" in caplog.text
    journal._file.execute("pragma max_page_count = 100000")
    path = journal.close()
    assert [row.request for row in read(path)] == [0] and read_facts(path).lost == {"disk": 3}
