"""How many programs share a multiprocessor."""

from __future__ import annotations

import pytest

from pensieve.lab.bench.kernel_code import KNOWN, resident

pytest.importorskip("triton")


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "programs"),
    [
        (32, 0, 8, 8),  # threads: 2048 of 2048
        (64, 0, 8, 4),  # registers: 64 x 2048 are twice 65,536
        (65, 0, 8, 3),  # given in units: 65 cost as much as 72
        (32, 80 * 1024, 4, 2),  # 81 KiB each of 164
        (32, 82 * 1024, 4, 1),
        (255, 0, 32, 0),
    ],
)
def test_the_scarcest_resource_decides(registers: int, shared: int, warps: int, programs: int) -> None:
    assert resident(registers, shared, warps, KNOWN[80]) == programs
