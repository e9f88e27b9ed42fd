"""What the proxy costs: python -m tests.traffic.overhead [seconds]

50 requests a second with prompts of 8 kB and replies of 50 tokens, 20 ms apart, from a scripted upstream in a process of its
own; each second request goes through the proxy, the others go to the upstream. Then 1,000 streams open at once.
"""

import asyncio
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from pensieve.lab.traffic.table import read, read_facts

RATE, TOKENS, GAP_S, PROMPT_BYTES, STREAMS = 50, 50, 0.02, 8000, 1000
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(text, **more):
    body = {"id": "chatcmpl-0123456789", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    body["choices"] = [{"index": 0, "delta": {"content": text}, "finish_reason": None}]
    data = b"data: " + json.dumps({**body, **more}).encode()
    return b"%x\r\n" % (len(data) + 2) + data + b"\n\n\r\n"


async def upstream(reader, writer):
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
            await reader.readexactly(length)
            await asyncio.sleep(GAP_S)
            writer.write(HEAD)
            for place in range(TOKENS):
                writer.write(event(f" w{place}"))
                await asyncio.sleep(GAP_S)
            usage = {"prompt_tokens": PROMPT_BYTES // 4, "completion_tokens": TOKENS}
            writer.write(event("", usage=usage) + b"0\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    writer.close()


def serve(pipe):
    async def main():
        server = await asyncio.start_server(upstream, "127.0.0.1", 0, backlog=2048)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


async def ask(port, number):
    """Milliseconds to the first token."""
    said = [{"role": "user", "content": (f"{number} words " * 999)[:PROMPT_BYTES]}]
    body = json.dumps({"stream": True, "messages": said}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    began = time.perf_counter()
    writer.write(head + body)
    await reader.readuntil(b" w0")
    first = time.perf_counter() - began
    await reader.readuntil(b"0\r\n\r\n")
    writer.close()
    return first * 1e3


async def load(ports, seconds):
    """TTFTs by port, which take turns, at RATE; the first second's are left out."""
    began, asked = time.perf_counter(), []
    for number in range(int(RATE * seconds)):
        await asyncio.sleep(max(0.0, began + number / RATE - time.perf_counter()))
        asked.append(asyncio.ensure_future(ask(ports[number % len(ports)], number)))
    found = await asyncio.gather(*asked)
    return [found[place + RATE - RATE % len(ports) :: len(ports)] for place in range(len(ports))]


def used(process):
    every = [process, *process.children(recursive=True)]
    return {p.pid: sum(p.cpu_times()[:2]) for p in every}, sum(p.memory_full_info().uss for p in every)


def main(seconds):
    pipe, end = multiprocessing.Pipe()
    up = multiprocessing.Process(target=serve, args=(end,), daemon=True)
    up.start()
    direct = pipe.recv()
    out = Path(tempfile.mkdtemp()) / "traffic.parquet"
    command = [sys.executable, "runners/record.py", "--port=0", f"--upstream=http://127.0.0.1:{direct}", f"--out={out}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as proxy:
        port = int(proxy.stdout.readline().rsplit(":", 1)[1].split(";")[0])
        process = psutil.Process(proxy.pid)
        asyncio.run(load([port], 3))
        rounds = [[statistics.median(one) for one in asyncio.run(load([direct, port], seconds / 5))] for _ in range(5)]
        before, _ = used(process)
        began = time.perf_counter()
        asyncio.run(load([port], seconds))
        spent = time.perf_counter() - began
        after, memory = used(process)
        cpu = {pid: (after[pid] - before.get(pid, 0)) / spent for pid in after}
        added = sorted(through - plain for plain, through in rounds)
        proxy_cpu, tokens = cpu.pop(process.pid), f"{RATE * TOKENS:,} tokens a second"
        print(f"TTFT added, median of {len(rounds)} rounds: {added[2]:.2f} ms ({added[0]:.2f} to {added[-1]:.2f})")
        print(f"CPU: proxy {proxy_cpu:.1%} of a core, writer {sum(cpu.values()):.1%}, at {tokens}")

        async def many():
            streams = [asyncio.ensure_future(ask(port, number)) for number in range(STREAMS)]
            await asyncio.sleep(GAP_S * TOKENS / 2)
            held = used(process)[1]
            await asyncio.gather(*streams)
            return held

        held = asyncio.run(many())
        print(f"Memory: {memory / 2**20:.0f} MiB, with {STREAMS:,} open streams {held / 2**20:.0f} MiB")
        proxy.terminate()
    rows, lost = list(read(out)), read_facts(out).lost
    print(f"{len(rows):,} rows, {sum(row.status == 'completed' for row in rows):,} completed, lost {lost}")
    up.kill()


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 20.0)
