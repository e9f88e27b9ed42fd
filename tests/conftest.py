"""For all tests: one thread for torch, as workers of pytest-xdist share the cores; options chosen
together are composed once, and what was imported is not searched for garbage."""

import gc
import os
import sys

import pytest

from tests.composed_once import composing_once


def pytest_configure():
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; for the processes that tests start, too


def pytest_collection_modifyitems(items):
    """Files with slow tests come first, so that no worker is left with a long test when the others are done."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


MANY_MODULES = 100
_here_to_stay = 0


def pytest_collection_finish():
    gc.set_threshold(10_000, 20, 20)  # tests make many objects and few cycles
    _keep_what_is_imported()


def pytest_runtest_teardown():
    """Large packages that a test imported first are kept as well."""
    if len(sys.modules) > _here_to_stay + MANY_MODULES:
        _keep_what_is_imported()


def _keep_what_is_imported():
    """No collection of cycles goes through its million objects again."""
    global _here_to_stay
    gc.collect()
    gc.freeze()
    _here_to_stay = len(sys.modules)


@pytest.fixture(autouse=True, scope="session")
def _composed_once():
    with composing_once():
        yield
