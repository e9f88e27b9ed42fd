"""What a newcomer has to open to follow one turn: the files of the package that it runs through.

13 are left, each for a question of its own: who drives (system, engine), what becomes of the request (its state, record,
session), who runs and what an iteration computes (scheduler), where KV is (manager, tiers, blocks, victims), what it takes
(worker, roofline), and what the books make of it.
"""

import pytest

from tests.crossings import generated_turn, restored_turn


@pytest.mark.parametrize(("turn", "files", "calls"), [(restored_turn, 13, 378), (generated_turn, 20, 882)])
def test_a_turn_whose_history_comes_back_from_cpu_crosses_few_files(turn, files, calls):
    found = turn()
    assert len(found.calls) <= files, f"{found}: {found.calls}"
    assert found.calls.total() <= calls, f"{found}: {found.calls}"
