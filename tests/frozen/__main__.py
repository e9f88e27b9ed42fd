"""Compare what the scenarios give now with what is frozen; freeze it anew; write rows out.

python -m tests.frozen [NAME ...] [--quick]    check all, those named (or whose name begins so), or those that are not slow
python -m tests.frozen --write [NAME ...]      freeze anew
python -m tests.frozen --show NAME FILE        all rows of one scenario, a line each, to be compared with diff
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

from tests.composed_once import composing_once
from tests.frozen.rows import KINDS, Rows
from tests.frozen.scenarios import SCENARIOS

FILE = Path(__file__).parent / "frozen.json"


def frozen() -> dict[str, Any]:
    return dict(json.loads(FILE.read_text()))


def differences(name: str, rows: Rows) -> list[str]:
    """What is not as it is frozen, a line a kind; totals first, since they say most."""
    was = frozen().get(name)
    if was is None:
        return ["not frozen yet"]
    now = rows.frozen(was.get("tie"))
    lines = [
        f"{total}: {was['totals'].get(total)} was frozen, now {now['totals'].get(total)}"
        for total in sorted({*was["totals"], *now["totals"]})
        if was["totals"].get(total) != now["totals"].get(total)
    ]
    return [*lines, *(f"{kind} differ" for kind in (*KINDS, "drawn") if was.get(kind) != now.get(kind))]


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("names", nargs="*")
    for flag in ("--quick", "--write", "--show"):
        parser.add_argument(flag, action="store_true")
    asked = parser.parse_args(words)
    if asked.show:
        name, file = asked.names
        rows = SCENARIOS[name].rows()
        lines = [json.dumps([kind, *row]) for kind in (*KINDS, "drawn") for row in getattr(rows, kind)]
        Path(file).write_text("\n".join(lines) + "\n")  # one row a line, so that `diff` of two files names the rows
        return 0
    chosen = [
        name
        for name, one in SCENARIOS.items()
        if (not asked.names or name.startswith(tuple(asked.names))) and not (asked.quick and one.slow)
    ]
    kept, wrong = frozen(), 0
    for name in chosen:
        began = time.perf_counter()
        try:
            rows = SCENARIOS[name].rows()
            if asked.write:
                kept[name] = rows.frozen()
            lines = [] if asked.write else differences(name, rows)
        except Exception as error:  # the others are still worth knowing
            lines = [f"failed: {error!r}"]
        wrong += bool(lines)
        said = "; ".join(lines) or ("frozen" if asked.write else "as frozen")
        print(f"{time.perf_counter() - began:6.2f} s  {name}: {said}", flush=True)
    if asked.write:
        lines = [f"{json.dumps(name)}: {json.dumps(kept[name])}" for name in SCENARIOS if name in kept]
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(chosen)} scenarios, {wrong} differ or fail")
    return wrong > 0


if __name__ == "__main__":
    with composing_once():
        sys.exit(main(sys.argv[1:]))
