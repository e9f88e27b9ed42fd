"""What a newcomer has to open to follow a sweep: the files whose functions four simulated trials run, from the command on.

Whoever merges rooms lowers the number.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
MOST = 59

SCRIPT = """
import cProfile, json, sys
from contextlib import nullcontext
from pathlib import Path

checkout, status, profile = Path(sys.argv[1]), None, cProfile.Profile(subcalls=False, builtins=False)
sys.path.insert(0, str(checkout))
sys.argv = ["runners/run.py", *sys.argv[2:]]
profile.enable()
try:
    from pensieve import cli
    from pensieve.lab.trial import sweep
    sweep.drawing = lambda *_: nullcontext(list)  # in another process, which is not looked at
    cli.run()
except SystemExit as left:
    status = left.code
profile.disable()
CO_OPTIMIZED = 1  # a function, not a module or the body of a class
codes = [entry.code for entry in profile.getstats() if not isinstance(entry.code, str)]
ran = {Path(code.co_filename) for code in codes if code.co_flags & CO_OPTIMIZED}
own = [str(file.relative_to(checkout)) for file in ran if file.is_relative_to(checkout / "pensieve")]
print(json.dumps([status, sorted(own)]))
"""


@pytest.mark.slow
def test_a_sweep_of_four_simulated_trials_runs_functions_of_few_files(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path))
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    words = "model=llama3_8b baseline=pensieve,gpu_only cache=small hardware=sim_h100 workload=chat_steady seed=0,1 -m"
    # In the process that is looked at, and without MLflow, whose import takes longer than all else.
    few = ["workload.conversations=4", "trial.isolate=false", "tracking.mlflow=false"]
    command = [sys.executable, "-c", SCRIPT, str(CHECKOUT), *words.split(), *few]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    status, files = json.loads(done.stdout.splitlines()[-1])
    assert status == 0, done.stderr
    assert "pensieve/core/engine.py" in files and "pensieve/lab/results/sweep_table.py" in files
    assert len(files) <= MOST, "\n".join([f"{len(files)} files", *files])
