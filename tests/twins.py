"""Which tests run the same branches: candidates to merge, no verdict. `make twins` counts and prints them.

A test that runs what another runs may still assert more: read both before one goes.
"""

import sqlite3
import sys
from pathlib import Path

import pandas

BRANCHES = """
select context.context as test, arc.file_id, arc.fromno, arc.tono
from arc join context on context.id = arc.context_id where context.context != ''
"""


def groups(database: Path) -> list[list[str]]:
    """Names of the tests with equal sets of branches, largest group first, from a file that coverage wrote.

    Raises:
        sqlite3.OperationalError: it was not written with `branch` and `dynamic_context`.
    """
    with sqlite3.connect(database) as connection:
        arcs = pandas.read_sql(BRANCHES, connection)
    arcs["branch"] = pandas.util.hash_pandas_object(arcs[["file_id", "fromno", "tono"]], index=False)
    sets = arcs.groupby("test")["branch"].agg(["sum", "size"]).reset_index()
    equal = [sorted(rows["test"]) for _, rows in sets.groupby(["sum", "size"]) if len(rows) > 1]
    return sorted(equal, key=lambda names: (-len(names), names))


if __name__ == "__main__":
    for names in groups(Path(sys.argv[1] if len(sys.argv) > 1 else ".coverage")):
        print(f"{len(names)} tests run the same branches:", *names, sep="\n  ")
