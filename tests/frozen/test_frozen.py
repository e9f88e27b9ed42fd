"""Every scenario gives the rows that are frozen, and the scenarios are what they say they are; what the laboratory shows of
recorded sweeps is what is frozen."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.frozen import lab
from tests.frozen.__main__ import differences, frozen
from tests.frozen.scenarios import SCENARIOS

PHASES = {"waiting", "swap in", "prefill", "decode", "suspended"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * one.slow) for name, one in SCENARIOS.items()]
)
def test_rows_are_as_frozen(name: str) -> None:
    assert not (found := differences(name, SCENARIOS[name].rows())), (
        f"python -m tests.frozen --show '{name}' FILE: {found}"
    )


def test_what_is_frozen_covers_what_it_should() -> None:
    totals: Counter[str] = Counter()
    for one in frozen().values():
        totals.update(one["totals"].pop("cancelled in", {}))
        totals.update({name: value for name, value in one["totals"].items() if isinstance(value, int | float)})
    statuses = {"completed", "cancelled", "timeout", "refused", "failed"}
    tokens = {"gpu_hit_tokens", "cpu_hit_tokens", "disk_hit_tokens", "shared_hit_tokens", "recomputed_tokens"}
    assert {*PHASES, *statuses, *tokens, "suspended_requests", "misses"} <= {
        name for name in totals if totals[name] > 0
    }
    assert set(frozen()) == set(SCENARIOS)


def test_windows_and_single_iterations_give_the_same_rows() -> None:
    """What a simulated machine skips ahead changes nothing but how many plans there are."""
    found = frozen()
    for name in (name for name in found if name.endswith(" stepwise")):
        one, other = found[name], found[name.removesuffix(" stepwise")]
        assert one == other, name


FROZEN = lab.frozen()


@pytest.fixture(scope="module")
def sweeps() -> Iterator[Path]:
    with lab.recorded() as folder:
        yield folder


@pytest.mark.slow
@pytest.mark.parametrize("sweep", lab.sweeps_of(FROZEN))
def test_what_is_shown_of_recorded_sweeps_is_as_frozen(sweep: int | None, sweeps: Path) -> None:
    """None: what is shown of all sweeps together."""
    was = {name: text for name, text in FROZEN.items() if lab.sweep_of(name) == sweep}
    lines = lab.differences(was, lab.now(sweeps, sweep))
    assert not lines, "python -m tests.frozen.lab --show FOLDER\n" + "\n".join(lines)
