"""How many programs share a multiprocessor, and that the cutting of work goes by it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pensieve.worker.torch.kernels.residency import KNOWN, Multiprocessor, resident, resident_of

A100 = SimpleNamespace(
    regs_per_multiprocessor=65536, shared_memory_per_multiprocessor=167936, max_threads_per_multi_processor=2048,
    shared_memory_per_block_optin=166912, multi_processor_count=108, major=8,
)  # fmt: skip


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


def test_what_the_device_says_is_what_is_known_of_it() -> None:
    assert Multiprocessor.of(A100) == KNOWN[80]
    assert Multiprocessor.of(SimpleNamespace(regs_per_multiprocessor=65536)) is None


def kernel(registers: int | None, shared: int) -> Any:
    return SimpleNamespace(n_regs=registers, metadata=SimpleNamespace(shared=shared))


def test_what_does_not_say_its_registers_is_not_judged() -> None:
    assert resident_of(kernel(142, 71680), 4, A100) == 2
    assert resident_of(kernel(255, 200_000), 8, A100) == 1, "it runs, whatever was computed"
    assert resident_of(None, 4, A100) is None and resident_of(kernel(None, 0), 4, A100) is None
    assert resident_of(kernel(142, 71680), 4, SimpleNamespace()) is None


def test_work_is_cut_for_as_many_programs_as_the_kernel_leaves_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from pensieve.worker.torch.kernels.triton_backend import Geometry, Learned

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: A100)
    geometry = Geometry(32, 8, 128, torch.bfloat16, torch.device("cuda", 0), 32)
    learned, tiles = Learned(), geometry.tiles(False, None, False)

    def wanted() -> int:
        return geometry.cutting(tiles, learned.programs_of(geometry, tiles, False)).wanted_items

    assert wanted() == 108 * 4 // 8, "before it was compiled"
    learned.note(geometry, tiles, False, kernel(142, 71680))
    assert wanted() == 108 * 2 // 8
    learned.note(geometry, tiles, False, kernel(32, 0))
    assert wanted() == 108 * 2 // 8, "its code is compiled once"
    assert learned.programs_of(geometry, geometry.tiles(True, None, False), True) == 4, "another kernel"
