"""What a turn crosses: files and functions of the package, calls, and how deep they are nested. And work counted in Python
calls, which no noise blurs, however busy the machine is."""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType, FrameType

import pensieve
from pensieve.core.request import Free, Request
from pensieve.serve.record import TurnRecord
from tests.baselines.systems import inline
from tests.simulated import request

PACKAGE = Path(pensieve.__file__).parent


@dataclass
class Crossed:
    """calls: Python calls by file, resumed generators included. deepest: calls of the package inside each other."""

    calls: Counter[str] = field(default_factory=Counter)
    functions: set[CodeType] = field(default_factory=set)
    deepest: int = 0

    def __str__(self) -> str:
        return (
            f"{len(self.calls)} files, {len(self.functions)} functions, {self.calls.total()} calls, {self.deepest} deep"
        )


def crossed_by(action: Callable[[], object]) -> Crossed:
    """What the action crosses in this thread."""
    found, depth = Crossed(), 0
    files: dict[CodeType, str | None] = {}

    def see(frame: FrameType, event: str, arg: object) -> None:
        nonlocal depth
        if event not in ("call", "return"):
            return
        code = frame.f_code
        if code not in files:
            path = Path(code.co_filename)
            files[code] = str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else None
        file = files[code]
        if file is None:
            return
        depth += 1 if event == "call" else -1
        if event == "call":
            found.calls[file] += 1
            found.functions.add(code)
            found.deepest = max(found.deepest, depth)

    sys.setprofile(see)
    try:
        action()
    finally:
        sys.setprofile(None)
    return found


def calls_of(action: Callable[[], object]) -> int:
    """Python calls that the action makes, resumed generators included."""
    calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls - 1  # the action itself


def restored_turn() -> Crossed:
    """From System.submit on: a turn whose history comes back from CPU, a prefill and a decode, until its record."""
    system = inline(gpu_blocks=16, cpu_blocks=64)
    system.start()

    def serve(made: Request) -> TurnRecord:
        system.submit(made)
        return next(event.turn for event in system.poll(None) if event.turn is not None)

    for number, session in enumerate("abcd", start=1):
        serve(request(number, session, tokens=30, output=2))
        system.poll(system.clock.now_s() + 1.0)  # copies end
    for other in "bcd":
        system.forget(other)
    message = request(9, "a", tokens=3, output=2)
    said = system.engine.cache.sessions["a"].tokens
    asked = replace(message, prompt=said + message.prompt, output=Free(2, ignore_eos=True))
    records: list[TurnRecord] = []
    found = crossed_by(lambda: records.append(serve(asked)))
    (restored,) = records
    assert restored.status == "completed"
    assert restored.cpu_hit_tokens
    assert restored.output_tokens == 2, "a prefill and one decode"
    return found


def generated_turn() -> Crossed:
    """The same through create_server(...).generate on sim_h100, where others have to leave the GPU for it."""
    from pensieve.serve.server import create_server

    with create_server(device="sim_h100", gpu_cache="320 tokens", cpu_cache="2048 tokens") as server:
        for session in "abcd":
            server.generate(session, list(range(3, 93)), max_new_tokens=2)
            server.generate(session, [5], max_new_tokens=8)
        before = server.get_statistics()
        found = crossed_by(lambda: server.generate("a", [1, 2, 3], max_new_tokens=2))
        after = server.get_statistics()
    assert after["cpu_hit_tokens"] > before["cpu_hit_tokens"]
    assert after["evicted_chunks"] > before["evicted_chunks"]
    return found
