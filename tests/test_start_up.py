"""What a command imports before it has said what the user waits for: modules, since time depends on the machine."""

import subprocess
import sys
from pathlib import Path

RUNNER = Path(__file__).resolve().parents[1] / "runners" / "run.py"

SCRIPT = """
import contextlib, io, sys
sys.path.insert(0, sys.argv[1])
from hydra.core.global_hydra import GlobalHydra
from pensieve import cli

def said(*arguments):
    GlobalHydra.instance().clear()
    sys.argv = ["run.py", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.run()
        except SystemExit as left:
            err.write(left.code if isinstance(left.code, str) else "")
    return out.getvalue() + err.getvalue()

def loaded(*names):
    return sorted(set(names) & set(sys.modules))

DATABASE = ("sqlalchemy", "alembic", "pyarrow")
NUMBERS = ("numpy", "scipy", "pandas", "matplotlib")
ENGINES = ("torch", "transformers", "mlflow", "fastapi")
for arguments, part in (
    (["--help"], "sim_a100_80g"),
    (["model=lama3_8b"], "did you mean llama3_8b?"),
    (["workload.userz=3"], "did you mean workload.users?"),
    (["model=lama3_8b", "-m"], "did you mean llama3_8b?"),
):
    text = said(*arguments)
    assert part in text, (arguments, text)
    found = loaded(*DATABASE, *NUMBERS, *ENGINES, "pydantic", "pensieve.lab.trial.command")
    assert not found, (arguments, found)
for arguments in (["cache.gpu=3Gx"], ["cache.gpu=3Gx", "-m"]):
    text = said(*arguments)
    assert "no known unit" in text, (arguments, text)
    # The cache that a configuration names is looked at, and chooses its victims in numpy.
    found = loaded(*DATABASE, *(name for name in NUMBERS if name != "numpy"), *ENGINES, "pensieve.lab.trial.run")
    assert not found, (arguments, found)

SHORT = ["hardware=sim_h100", "workload.pressure=0", "workload.min_turns=2", "workload.max_turns=2", "tracking.mlflow=false"]
text = said(*SHORT)
found = loaded(*ENGINES, "pandas", "matplotlib", "scipy.stats", "huggingface_hub.errors")
assert not found, found
assert "Database:" in text, text

from pensieve import create_server
with create_server(model="llama3_8b", device="sim_a100_80g", gpu_cache="2GB", cpu_cache="4GB") as server:
    server.generate("a", prompt_ids=[1, 2, 3], max_new_tokens=2)
    assert server.get_statistics()["engine"]
from tests.trial.test_identity import CPU, identity
assert identity(*CPU).fingerprint
found = loaded("torch", "transformers", "mlflow")
assert not found, ("a simulated server, or the identity of a real trial", found)

import importlib.util
if importlib.util.find_spec("fastapi"):
    import pensieve.serve.server.app
    found = loaded("ray", "grpc", "torch", "pensieve.plugins.replicas")
    assert not found, ("serve", found)
print("as it should be")
"""


def test_nothing_is_imported_before_it_is_needed(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path))
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)  # that a command in this process has set
    command = [sys.executable, "-c", SCRIPT, str(RUNNER.parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout == "as it should be\n", done.stderr
