import subprocess
import sys

SCRIPT = """
import sys
from pensieve import create_server
with create_server(model="llama3_8b", device="sim_a100_80g", gpu_cache="2GB", cpu_cache="4GB") as server:
    server.generate("a", prompt_ids=[1, 2, 3], max_new_tokens=2)
    print(server.get_statistics_str())
loaded = {"torch", "transformers", "mlflow"} & set(sys.modules)
assert not loaded, loaded
"""


def test_a_simulated_server_imports_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "simulated" in done.stdout or "a100" in done.stdout.lower()
