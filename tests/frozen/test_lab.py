"""What the laboratory shows of the recorded sweeps is what is frozen."""

from __future__ import annotations

import pytest

from tests.frozen.lab import differences, frozen, now, sweep_of, sweeps_of

FROZEN = frozen()


@pytest.mark.slow
@pytest.mark.parametrize("sweep", sweeps_of(FROZEN))
def test_what_is_shown_is_as_frozen(sweep: int | None) -> None:
    """None: what is shown of all sweeps together."""
    was = {name: text for name, text in FROZEN.items() if sweep_of(name) == sweep}
    found = now(sweep)
    assert not (lines := differences(was, found)), "python -m tests.frozen.lab --show FOLDER\n" + "\n".join(lines)
