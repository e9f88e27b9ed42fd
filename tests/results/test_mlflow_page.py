"""A sweep of more trials than MLflow shows at once, in the browser of whoever looks at it."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import numpy as np
import pytest
from sqlalchemy import insert

from pensieve.results.mlflow_store import mlflow_url
from pensieve.results.schema import MetricRow, SweepTrial, Trial
from pensieve.results.store import open_store
from tests.results.browser import CHROMIUM, Page
from tests.results.trials import add_trial, conversation_turns, open_sweep
from tests.typed import typed

CHILDREN = 101  # more than the hundred


@pytest.fixture
def outputs(tmp_path):
    """A sweep of completed trials in the database, and the MLflow store that is made from it."""
    pytest.importorskip("mlflow.store.tracking.sqlalchemy_store")  # imported here, in each fork no more
    store = open_store(tmp_path)
    sweep = open_sweep(store, CHILDREN, seed=f"range(0,{CHILDREN})")
    first = add_trial(store, sweep, 0, "pensieve", conversation_turns([10.0, 11.0]), {"ttft_ms_mean": 10.0})
    with store.database.writing() as connection:
        row = dict(connection.execute(Trial.__table__.select()).one()._mapping)
        rest = range(first + 1, first + CHILDREN)
        trials = [{**row, "id": i, "fingerprint": f"f{i}", "seed": i - first} for i in rest]
        connection.execute(insert(Trial), trials)
        connection.execute(
            insert(SweepTrial), [{"sweep_id": sweep, "trial_id": i, "job": i - first, "reused": False} for i in rest]
        )
        connection.execute(
            insert(MetricRow),
            [{"trial_id": i, "name": "ttft_ms_mean", "label": "", "value": 10.0 + i, "unit": "ms"} for i in rest],
        )
    store.set_sweep(sweep, status="completed")
    done = typed("runners/results.py", "rebuild-mlflow", outputs=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{CHILDREN + 1} MLflow runs were made")
    return tmp_path


@pytest.fixture
def page(outputs):
    """The address of MLflow's own server on that store, as `make ui` starts it, on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "mlflow", "ui", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", mlflow_url(outputs),
    ]  # fmt: skip
    quiet = {**os.environ, "DO_NOT_TRACK": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
    quiet["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
    with (outputs / "ui.log").open("w") as log:
        server = subprocess.Popen(command, env=quiet, stdout=log, stderr=log, start_new_session=True)
    try:
        address, ends = f"http://127.0.0.1:{port}", time.monotonic() + 200
        while True:
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).read()
                break
            except OSError:
                assert server.poll() is None, (outputs / "ui.log").read_text()
                assert time.monotonic() < ends, "MLflow's server did not start"
                time.sleep(0.2)
        yield address
    finally:
        os.killpg(server.pid, 15)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:  # its own children keep it
            os.killpg(server.pid, 9)
            server.wait()


OPEN_PARENT = """(() => {
  let found = document.querySelector('a[href*="/runs/"]');
  while (!found.querySelector('button')) found = found.parentElement;
  found.querySelector('button').click();
})()"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_browser_shows_more_children_than_fit_one_page(outputs, page, tmp_path):
    """The experiment's page, with the sweep's parent opened; MLflow draws the first hundred and offers more."""
    from matplotlib.image import imread

    shot = tmp_path / "page.png"
    browser = Page(f"{page}/#/experiments/1/runs", tmp_path / "profile")
    try:
        browser.wait_for(lambda text: re.search(r'href="[^"]*/runs/[0-9a-f]{32}"', text), 200)
        browser.ask("Runtime.evaluate", expression=OPEN_PARENT)
        seen = browser.wait_for(lambda text: len(names_in(text)) >= 50, 200)
        browser.screenshot(shot)
    finally:
        browser.close()
    assert names_in(seen) <= {f"pensieve seed={seed}" for seed in range(CHILDREN)}
    pixels = (imread(shot)[..., :3] * 255).astype(np.uint8).reshape(-1, 3)
    colours, counts = np.unique(pixels, axis=0, return_counts=True)
    assert len(colours) > 100
    assert counts.max() < 0.97 * counts.sum()  # not one colour
    if kept := os.environ.get("PENSIEVE_KEEP_SCREENSHOT"):
        shutil.copy(shot, kept)


def names_in(text):
    return set(re.findall(r"pensieve seed=\d+", text))
