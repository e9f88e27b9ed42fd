"""A sweep as jobs of Slurm, over stand-ins for its commands."""

import importlib.util
import os
import re
from pathlib import Path

import pytest

from tests.runners.sweeping import SHORT
from tests.runners.test_run import rows
from tests.typed import typed

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("submitit") is None
    or importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is None,
    reason="hydra-submitit-launcher is not installed",
)

SWEEP = (*SHORT, "seed=0", "baseline=pensieve,stateless", "tracking.mlflow=false", "-m")

# As Slurm does: the script is kept as it was handed in, and each task of the array is run with its number, one after another
# here, by nobody who waits for it.
SBATCH = r"""#!/bin/bash
cp "$1" "$SLURM_STANDIN/script.sh"
last=$(sed -n 's/^#SBATCH --array=0-\([0-9]*\)%.*/\1/p' "$1")
(
    for task in $(seq 0 "$last"); do
        export SLURM_ARRAY_JOB_ID=4711 SLURM_ARRAY_TASK_ID=$task SLURM_JOB_ID=$((4711 + task)) SLURM_JOB_NODELIST=node1
        export SLURM_NTASKS=1 SLURM_JOB_NUM_NODES=1 SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0
        bash "$SLURM_STANDIN/script.sh"
        touch "$SLURM_STANDIN/ended-$task"
    done
) >"$SLURM_STANDIN/said.txt" 2>&1 </dev/null &
echo "Submitted batch job 4711"
"""
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do [[ $1 == --output || $1 == --error ]] && shift; shift; done
exec "$@"
"""
SACCT = """#!/bin/bash
echo "JobID|State|NodeList"
for task in 0 1; do
    [[ -e $SLURM_STANDIN/ended-$task ]] && state=COMPLETED || state=RUNNING
    echo "4711_$task|$state|node1"
done
"""


@pytest.mark.slow
def test_each_trial_is_a_job_of_its_own_and_written_once(tmp_path: Path) -> None:
    standin, outputs = tmp_path / "slurm", tmp_path / "outputs"
    standin.mkdir()
    for name, script in (("sbatch", SBATCH), ("srun", SRUN), ("sacct", SACCT)):
        (standin / name).write_text(script)
        (standin / name).chmod(0o755)
    cluster = {"PATH": f"{standin}:{os.environ['PATH']}", "SLURM_STANDIN": str(standin)}
    asked = ("hydra/launcher=slurm", "hydra.launcher.partition=long", "hydra.launcher.gpus_per_node=1")
    done = typed("runners/run.py", *SWEEP, *asked, outputs=outputs, **cluster)
    said = standin / "said.txt"
    assert done.returncode == 0, done.stdout + done.stderr + (said.read_text() if said.exists() else "")
    trials = rows(outputs, "SELECT baseline, attempt, status, pid FROM trial ORDER BY baseline")
    assert [trial[:3] for trial in trials] == [("pensieve", 1, "completed"), ("stateless", 1, "completed")]
    assert len({pid for *_, pid in trials}) == 2, "a process each"
    assert rows(outputs, "SELECT job, count(*) FROM sweep_trial GROUP BY job ORDER BY job") == [(0, 1), (1, 1)]
    assert rows(outputs, "SELECT status FROM sweep") == [("completed",)]
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", (standin / "script.sh").read_text(), re.M))
    assert (options["partition"], options["gpus-per-node"], options["cpus-per-task"]) == ("long", "1", "8")
    assert (options["array"], options["mem"], options["time"]) == ("0-1%2", "32GB", "120")
