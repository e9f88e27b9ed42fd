"""What a newcomer has to open to follow one turn: the files of the package that it runs through.

20 are left, each for a question of its own, so that fewer would put two questions into one file: who drives (system, engine,
clock, idle conversations), what becomes of the request (sequence, record, session), who runs and what an iteration computes
(scheduler, composition), where KV is (contract, manager, tiers, pool, restore, victims, policy), what it takes (worker,
roofline), and what it is charged for (the ledger of misses, prices of positions).
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pensieve
from pensieve.record import TurnRecord
from pensieve.request import Free, Request
from tests.baselines.systems import inline
from tests.simulated import request

MOST_FILES = 20
PACKAGE = Path(pensieve.__file__).parent


def files_crossed() -> Counter[str]:
    """Calls in each file of the package, of a turn whose history comes back from CPU: a prefill and a decode."""
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
    asked = replace(request(9, "a", tokens=3, output=2), output=Free(2, ignore_eos=True))
    calls: Counter[str] = Counter()

    def see(frame: FrameType, event: str, arg: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(PACKAGE):
            calls[str(file.relative_to(PACKAGE))] += 1

    sys.setprofile(see)
    try:
        restored = serve(asked)
    finally:
        sys.setprofile(None)
    assert restored.status == "completed"
    assert restored.cpu_hit_tokens
    assert restored.output_tokens == 2, "a prefill and one decode"
    return calls


def test_a_turn_whose_history_comes_back_from_cpu_crosses_few_files() -> None:
    calls = files_crossed()
    crossed = "\n".join(f"{count:5} calls  {file}" for file, count in calls.most_common())
    assert len(calls) <= MOST_FILES, f"{len(calls)} files:\n{crossed}"
