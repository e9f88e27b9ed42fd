"""A sweep of more trials than MLflow shows at once, in the browser of whoever looks at it; and a sweep that is logged to that
server from elsewhere."""

import json
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

from pensieve.lab.results.mlflow_store import mlflow_url
from pensieve.lab.results.schema import MetricRow, SweepTrial, Trial
from pensieve.lab.results.store import open_store
from tests.composed import SHORT
from tests.results.browser import CHROMIUM, Page
from tests.results.trials import add_trial, conversation_turns, open_sweep
from tests.typed import typed

CHILDREN = 101  # more than the hundred


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """A sweep of completed trials in the database, and the MLflow store that is made from it."""
    pytest.importorskip("mlflow.store.tracking.sqlalchemy_store")  # imported here, in each fork no more
    tmp_path = tmp_path_factory.mktemp("served")
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


@pytest.fixture(scope="module")
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
        server = subprocess.Popen(command, env=quiet, cwd=outputs, stdout=log, stderr=log, start_new_session=True)
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
def test_a_browser_shows_more_children_than_fit_one_page(page, tmp_path):
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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sweep_elsewhere_is_logged_over_http(page, tmp_path):
    """Parameters, metrics and files go to the server, under the sweep's parent; beside the results is no store."""
    said = typed(
        "runners/run.py", "hardware=sim_h100", *SHORT, "seed=0", "baseline=pensieve,stateless",
        "experiment_name=elsewhere", "-m", outputs=tmp_path, PENSIEVE_MLFLOW_URL=page,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    assert "View run" not in said.stdout, "MLflow's own lines for each run"
    assert not (tmp_path / "mlflow.db").exists() and (tmp_path / "results.db").exists()
    experiment = asked(page, "experiments/get-by-name?experiment_name=elsewhere")["experiment"]["experiment_id"]
    runs = asked(page, "runs/search", {"experiment_ids": [experiment]})["runs"]
    tags = [{tag["key"]: tag["value"] for tag in run["data"]["tags"]} for run in runs]
    [parent] = [run["info"]["run_id"] for run, own in zip(runs, tags, strict=True) if "mlflow.parentRunId" not in own]
    children = [run for run, own in zip(runs, tags, strict=True) if own.get("mlflow.parentRunId") == parent]
    assert len(children) == 2 and {run["info"]["status"] for run in runs} == {"FINISHED"}
    for run in children:
        assert "ttft_ms_mean" in {metric["key"] for metric in run["data"]["metrics"]}
        assert "baseline" in {param["key"] for param in run["data"]["params"]}
        files = asked(page, f"artifacts/list?run_id={run['info']['run_id']}")["files"]
        assert {"config.json", "turns.parquet"} <= {file["path"] for file in files}


def asked(page, what, body=None):
    """The answer of the server's REST API; a POST where there is a body."""
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{page}/api/2.0/mlflow/{what}", content, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)
