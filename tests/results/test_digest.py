from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pensieve
from pensieve.lab.results import identity as digest
from pensieve.lab.results.identity import cached, code_hash, content_hash

SOURCE = '''"""What it is."""

def double(value: int) -> int:
    """Twice as much."""
    return 2 * value  # a comment
'''


C_SOURCE = "int twice(int value) { return 2 * value; }"
RUN = """
from __future__ import annotations
from typing import TYPE_CHECKING
from pensieve.core import cache
from pensieve.core.cache import Lru
from pensieve.lab.results.store import Store
if TYPE_CHECKING:
    from pensieve.kinds import Kind

def real():
    from pensieve.device import kernels
    import_module(f"pensieve.formats.{name}")
    run("helper.py")
"""
PACKAGES = (
    "", "core/", "lab/", "serve/", "plugins/", "lab/trial/", "device/", "formats/", "plugins/engines/", "serve/server/",
)  # fmt: skip
FILES = {
    **{f"{room}__init__.py": "" for room in PACKAGES},
    "lab/trial/run.py": RUN,
    "core/cache/__init__.py": "if TYPE_CHECKING:\n    from pensieve.core.cache.lru import Lru",
    "core/cache/loops.c": C_SOURCE,
    "device/native.c": C_SOURCE,
    "lab/results/store.py": "import pensieve.unseen",
    "plugins/engines/llama_cpp.py": "from .base import Engine",
    "serve/server/command.py": "import pensieve.serve.server.api",
    **dict.fromkeys(
        (
            "lab/trial/helper.py", "lab/trial/__pycache__/run.pyc", "lab/bench/command.py", "kinds.py", "unseen.py",
            "core/cache/lru.py", "core/cache/tables/h100/rates.json", "formats/azure.py", "device/kernels.py",
            "plugins/engines/base.py", "plugins/engines/openai_http.py", "serve/server/api.py", "serve/server/page.html",
        ),
        SOURCE,
    ),
}  # fmt: skip
SIM = {"hardware": {"simulated": True}}


def engine(name: str) -> dict[str, Any]:
    return {"baseline": {"engine": {"_target_": f"pensieve.plugins.engines.{name}"}, "simulated": None}}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "digests"))
    made = tmp_path / "pensieve"
    for name, text in FILES.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(text)
    monkeypatch.setattr(pensieve, "__file__", str(made / "__init__.py"))
    digest._package.cache_clear()
    yield made
    digest._package.cache_clear()


def code_changes(file: Path, old: str, new: str, **asked: Any) -> bool:
    """Whether an edit of this file changes the hash."""
    before, text = code_hash(**asked), file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    digest._package.cache_clear()
    return code_hash(**asked) != before


@pytest.mark.parametrize(
    ("name", "simulated", "real", "serving"),
    [
        ("lab/trial/helper.py", True, True, False),  # run by its path
        ("kinds.py", False, False, False),  # for type checkers
        ("core/cache/lru.py", True, True, False),  # resolved by its package on first use
        ("core/cache/loops.c", True, True, False),
        ("core/cache/tables/h100/rates.json", True, True, False),
        ("unseen.py", False, False, False),  # by the results alone
        ("formats/azure.py", True, True, False),  # by import_module
        ("device/kernels.py", False, True, False),
        ("device/native.c", False, True, False),
        ("plugins/engines/llama_cpp.py", False, False, False),
        ("serve/server/api.py", False, False, True),
        ("serve/server/page.html", False, False, True),
        ("lab/bench/command.py", False, False, False),
        ("lab/trial/__pycache__/run.pyc", False, False, False),
    ],
)
def test_which_files_of_the_package_count(package: Path, name: str, simulated: bool, real: bool, serving: bool) -> None:
    for asked, counts in (
        ({"config": SIM}, simulated), ({"config": {}}, real), ({"entry": "pensieve.serve.server.command"}, serving),
    ):  # fmt: skip
        old, new = (
            ("import", "import pensieve.kinds, ") if name == "plugins/engines/llama_cpp.py" else ("2 *", "2 * 1 *")
        )
        assert code_changes(package / name, old, new, **asked) is counts


def test_what_does_not_count_is_there() -> None:
    root = Path(pensieve.__file__).parent
    assert [name for name in (*digest.NOT_CODE, *digest.NOT_SIMULATED) if not (root / name).exists()] == []


@pytest.mark.parametrize(
    ("old", "new", "counts"),
    [
        ("Twice as much", "Two times", False),
        ("2 * value", "(2\n        * value)", False),
        ("value: int", "value: float", True),
        ("-> int:", "-> int:\n    print(value)", True),
        ("def", "no Python", True),
    ],
)
def test_what_of_a_source_counts(package: Path, old: str, new: str, counts: bool) -> None:
    assert code_changes(package / "core/cache/lru.py", old, new) is counts


@pytest.mark.slow
@pytest.mark.parametrize("hardware", ["sim_h100", "cpu"])
def test_all_that_a_trial_loads_counts(tmp_path: Path, hardware: str) -> None:
    """But what records it, and for a simulated one what only real workers need."""
    program = """
import sys
from pathlib import Path
import pensieve
from pensieve.lab.compose.settings import resolved
from pensieve.lab.results.identity import NOT_CODE, NOT_SIMULATED, code_of
from pensieve.lab.trial.job import Job
from pensieve.lab.trial.run import run_trial
from pensieve.lab.trial.job import open_tracking
from tests.composed import SHORT, checked, composed
words = (*SHORT, *sys.argv[1:])
job = Job("a", Path.cwd())
outcome = run_trial(checked(*words), resolved(composed(*words)), open_tracking(checked(*words)), job, print)
assert outcome.completed, outcome.error
root = Path(pensieve.__file__).parent
files = {Path(one.__file__) for name, one in sys.modules.items() if name.split(".")[0] == "pensieve"}
loaded = {file.relative_to(root).as_posix() for file in files}
config = resolved(composed(*words))
left_out = (*NOT_CODE, *NOT_SIMULATED) if config["hardware"]["simulated"] else NOT_CODE
print("missing", sorted(name for name in loaded - set(code_of(config)) if not name.startswith(left_out)))
"""
    words = [
        f"hardware={hardware}", "hardware.threads=1", "trial.exclusive=false", "model.architecture.num_hidden_layers=1",
        "workload.users=2", "workload.max_new_tokens=4", "workload.think_time_s=0", "workload.request_interval=0",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PENSIEVE_OUTPUTS": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    missing = done.stdout.splitlines()[-1]
    assert missing == "missing []"


@pytest.mark.parametrize(
    "named", [{"list": [{"_target_": "my_policy_module.X"}]}, {"composition": "my_policy_module.X"}]
)
def test_a_users_own_module_counts_and_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: dict[str, Any]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "my_policy_module.py"
    module.write_text("raise RuntimeError('imported')")
    policy = {"_target_": "pensieve.core.policies.lru.Lru"}
    config = {"eviction": {**policy, **named}}
    before = code_hash(config)
    assert before != code_hash({"eviction": policy})
    module.write_text("class MyPolicy: ...")
    changed = code_hash(config)
    assert changed != before
    module.write_text("class MyPolicy: ...  # mine")
    assert code_hash(config) == changed
    assert "my_policy_module" not in sys.modules
    assert code_hash({"_target_": "no_such_module.X"}) == code_hash()


@pytest.mark.parametrize("line", ["import my_parts.scores", "from .scores import best"])
def test_what_a_users_module_imports_of_the_users_own_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    parts = tmp_path / "my_parts"
    parts.mkdir()
    (parts / "__init__.py").touch()
    (parts / "policy.py").write_text(f"import json\n{line}\n\nclass Mine: ...")
    (parts / "scores.py").write_text("best = 1")
    config = {"_target_": "my_parts.policy.Mine"}
    before = code_hash(config)
    (parts / "scores.py").write_text("best = 2")
    assert code_hash(config) != before


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pensieve" / "digests"


def test_a_large_file_is_read_once_until_it_is_written_to(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "CACHED_BYTES", 10)
    read, of_file = list[Path](), digest._digest
    monkeypatch.setattr(digest, "_digest", lambda path: read.append(path) or of_file(path))
    path = tmp_path / "weights"
    path.write_bytes(b"a" * 100)

    def ask() -> str:
        digest._file_hash.cache_clear()  # as another process would
        return content_hash(path)

    before, times = ask(), path.stat()
    assert (ask(), len(read)) == (before, 1)
    while path.stat().st_ctime_ns == times.st_ctime_ns:  # the clock of a file system ticks some 250 times a second
        path.write_bytes(b"a" * 99 + b"b")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # the same size and mtime; the ctime cannot be set
    assert ask() != before
    assert (len(read), len(list(cache.iterdir()))) == (2, 1)


def test_a_cache_that_cannot_be_used_costs_only_time(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cached("name", "1", lambda: "digest") == "digest"
    (file,) = cache.iterdir()
    file.write_text("[]")
    assert cached("name", "1", lambda: "another") == "another"
    assert cached("name", "1", lambda: "not asked") == "another"
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/no/such/folder")
    assert cached("name", "1", lambda: "computed") == "computed"
