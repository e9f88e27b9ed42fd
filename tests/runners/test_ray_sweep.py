"""A sweep on a Ray cluster of two nodes writes every trial once."""

import importlib.util
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from pensieve.plugins.engines.ray_agents import own_environment

CHECKOUT = Path(__file__).parents[2]
SHORT = ("hardware=sim_h100", "workload.pressure=0", "workload.min_turns=2", "workload.max_turns=2", "seed=0,1")


@pytest.mark.slow
def test_two_nodes_write_every_trial_once(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    if importlib.util.find_spec("hydra_plugins.hydra_ray_launcher") is None:
        pytest.skip("hydra-ray-launcher is not installed")
    with own_environment():
        _sweep(tmp_path)
    with sqlite3.connect(tmp_path / "results.db") as database:
        trials = database.execute("SELECT fingerprint, attempt, status, pid, baseline, seed FROM trial").fetchall()
        jobs = database.execute("SELECT job, count(*) FROM sweep_trial GROUP BY job").fetchall()
    assert [(attempt, status) for _, attempt, status, *_ in trials] == [(1, "completed")] * 4
    assert len({fingerprint for fingerprint, *_ in trials}) == 4
    assert jobs == [(number, 1) for number in range(4)]
    assert os.getpid() not in {pid for *_, pid, _, _ in trials} and len({pid for *_, pid, _, _ in trials}) >= 2


def _sweep(outputs: Path) -> None:
    from ray.cluster_utils import Cluster

    one = {"num_cpus": 1, "object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={**one, "include_dashboard": False})
    try:
        cluster.add_node(**one)
        environment = {**os.environ, "RAY_ADDRESS": cluster.address, "PENSIEVE_OUTPUTS": str(outputs)}
        command = [sys.executable, str(CHECKOUT / "runners" / "run.py"), *SHORT, "baseline=pensieve,stateless", "-m"]
        command += ["hydra/launcher=ray_cluster", "tracking.mlflow=false"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        cluster.shutdown()
