"""For all tests: one thread for torch, as workers of pytest-xdist share the cores; options chosen
together are composed once, and what was imported is not searched for garbage."""

import gc
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from pensieve.hub import user_cache
from pensieve.lab.results import mlflow_runs
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
def _mlflow_stores_are_copies():
    """Of one that is empty: MLflow's fifty migrations take seconds, in each folder of a test."""
    client_of = mlflow_runs.client_of

    def copied(outputs):
        empty, database = user_cache() / f"mlflow-{version('mlflow')}.db", outputs / mlflow_runs.DATABASE_NAME
        if not empty.exists():
            empty.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=empty.parent) as folder:
                client_of(Path(folder)).search_experiments(max_results=1)
                Path(folder, database.name).replace(empty)
        if not database.exists():
            shutil.copyfile(empty, database)
        return client_of(outputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlflow_runs, "client_of", copied)
        yield


@pytest.fixture(autouse=True, scope="session")
def _composed_once():
    with composing_once():
        yield


@pytest.fixture
def tracking(tmp_path, monkeypatch):
    """A database in a folder of its own."""
    from pensieve.lab.trial.job import open_tracking
    from tests.composed import checked

    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path))
    return replace(open_tracking(checked("tracking=local").tracking), mlflow=False)
