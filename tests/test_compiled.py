"""The compiled modules: found where they fit and only there, and to the same results as their sources."""

import ast
import hashlib
import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pensieve import cli, compiled
from pensieve.cache.prefix import PrefixCache
from pensieve.cache.slots import SlotCache
from pensieve.cache.stateless import StatelessCache
from pensieve.cache.two_tier import TwoTierCache
from pensieve.cost.simulated import simulated_cost
from pensieve.eviction.base import EvictionPolicy
from pensieve.eviction.learned_return import LearnedReturn
from pensieve.eviction.lru import Lru
from pensieve.eviction.retention_value import RetentionValue
from tests.simulated import MACHINE, MODEL, make_engine, request

CHECKOUT = Path(__file__).resolve().parents[1]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A user's cache of its own, and nobody has said that modules are not to be compiled ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(compiled.SWITCH)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    return tmp_path / "pensieve" / "compiled"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A copy of the sources that a build is made of."""
    root = tmp_path / "sources" / "pensieve"
    for folder in compiled._READ:
        (root / folder).mkdir(exist_ok=True, parents=True)
        for file in (compiled._ROOT / folder).glob("*.py"):
            shutil.copy(file, root / folder)
    monkeypatch.setattr(compiled, "_ROOT", root)
    return root


def put_build(cache, name="session"):
    folder = cache / compiled.key()
    folder.mkdir(parents=True)
    (folder / f"pensieve.{name}{compiled._SUFFIX}").touch()
    return folder


def found(name):
    return next(spec for finder in sys.meta_path if (spec := finder.find_spec(name, None)) is not None)


def test_a_build_of_these_sources_is_used(cache):
    folder = put_build(cache)
    compiled.use()
    assert compiled.in_use()
    assert found("pensieve.session").origin == str(folder / f"pensieve.session{compiled._SUFFIX}")


@pytest.mark.parametrize("module", ["cache/tiers.py", "record.py", "cost/measured.py"])
def test_a_changed_source_is_run_as_it_stands(cache, package, module):
    put_build(cache)
    with (package / module).open("a") as file:
        file.write("# changed\n")
    compiled.use()
    assert not compiled.in_use()


def test_the_environment_turns_it_off(cache, monkeypatch):
    put_build(cache)
    monkeypatch.setenv(compiled.SWITCH, "0")
    compiled.use()
    assert not compiled.in_use()


def test_without_a_build_nothing_is_read(cache, monkeypatch):
    monkeypatch.setattr(compiled, "key", lambda: pytest.fail("sources were read"))
    compiled.use()
    assert not compiled.in_use()


def test_a_cache_that_cannot_be_read_is_none(cache, monkeypatch):
    put_build(cache)

    def unreadable():
        raise PermissionError("not yours")

    monkeypatch.setattr(compiled, "key", unreadable)
    compiled.use()
    assert not compiled.in_use()


def test_whatever_is_compiled_against_makes_the_key():
    """A module outside would change what is compiled without another build."""
    waiting, seen = [f"pensieve.{name.replace('/', '.')}" for name in compiled.MODULES], set()
    while waiting:
        name = waiting.pop()
        path = compiled._ROOT.joinpath(*name.split(".")[1:]).with_suffix(".py")
        if name in seen or not path.is_file():
            continue
        seen.add(name)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pensieve"):
                waiting += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    assert len(seen) > len(compiled.MODULES)
    folders = {"/".join(name.split(".")[1:-1]) for name in seen}
    assert folders <= set(compiled._READ)


# -- building -----------------------------------------------------------------------------------------------------------


def compile_as_typed(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["pensieve compile"])
    status = cli.compile()
    return status, capsys.readouterr()


def test_without_mypyc_it_says_what_to_install(cache, monkeypatch, capsys):
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mypyc" else there(name))
    status, said = compile_as_typed(monkeypatch, capsys)
    assert status == 1 and said.err.count("\n") == 1
    assert "mypyc" in said.err and "pip install 'pensieve[fast]'" in said.err


@pytest.mark.parametrize(
    ("given", "named"), [("no-such-compiler", "CC=no-such-compiler is not one"), ("", "there is none")]
)
def test_without_a_compiler_it_says_what_to_install(cache, monkeypatch, capsys, given, named):
    pytest.importorskip("mypyc")
    monkeypatch.setenv("CC", given)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    status, said = compile_as_typed(monkeypatch, capsys)
    assert status == 1 and said.err.count("\n") == 1
    assert named in said.err and "install gcc or clang" in said.err


@pytest.mark.slow
def test_a_module_is_compiled_kept_and_replaced(cache, package, monkeypatch, capsys):
    pytest.importorskip("mypyc")
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler")
    monkeypatch.setattr(compiled, "MODULES", ("hint",))
    own = package / "compiled.py"
    own.write_text(re.sub(r"MODULES = \(.*?\n\)", 'MODULES = ("hint",)', own.read_text(), count=1, flags=re.DOTALL))
    old = put_build(cache)
    (old / compiled._MADE_OF).write_text(str(package))
    with (package / "hint.py").open("a") as file:
        file.write("\n\ndef twice(count: int) -> int:\n    return 2 * count\n")
    status, said = compile_as_typed(monkeypatch, capsys)
    assert (status, said.err) == (0, "")
    assert [folder.name for folder in cache.iterdir()] == [compiled.key()], "no scratch is left, and no older build"
    compiled.use()
    module = importlib.util.module_from_spec(found("pensieve.hint"))
    assert module.twice(4) == 8
    with pytest.raises(TypeError, match="int"):  # only what is compiled minds
        module.twice("ab")
    (package / "hint.py").write_text("count: int = 'one'\n")
    status, said = compile_as_typed(monkeypatch, capsys)
    assert status == 1 and "hint.py:1: error" in said.err and said.err.count("\n") == 1


# -- results ------------------------------------------------------------------------------------------------------------


class HeadOnly(TwoTierCache):
    """A cache of a user's (docs/recipes.md)."""

    grows = True

    def release(self, session, now_s):
        super().release(session, now_s)
        self.tiers.discard(session, 3)


class Longest(EvictionPolicy):
    """A policy of a user's (docs/recipes.md)."""

    def order(self, session, chunk):
        return -len(session.tokens)


KINDS = {
    "retention value": (TwoTierCache, RetentionValue),
    "lru": (TwoTierCache, Lru),
    "ages": (TwoTierCache, LearnedReturn),
    "a policy of a user's": (TwoTierCache, Longest),
    "a cache of a user's": (HeadOnly, RetentionValue),
    "prefix cache": (PrefixCache, Lru),
    "slots": (SlotCache, Lru),
    "stateless": (StatelessCache, Lru),
}


def outcomes(seeds=(1, 3)):
    """Of many small loads: a digest of everything that was seen, by name. Not compiled itself."""
    digests = {}
    for name, (manager, policy) in KINDS.items():
        seen = [_outcome(seed, manager, policy) for seed in seeds]
        digests[name] = hashlib.sha256(repr(seen).encode()).hexdigest()
    return digests


def _outcome(seed, manager, policy):
    rng = random.Random(seed)
    chunk_tokens = rng.choice([4, 8])
    engine = make_engine(
        gpu_blocks=rng.choice([24, 40]),
        cpu_blocks=rng.choice([8, 48]) if issubclass(manager, TwoTierCache) else 0,
        chunk_tokens=chunk_tokens,
        cache=manager,
        policy=policy,
        depth=rng.choice([1, 1, 2]),
        late=random.Random(seed) if seed % 4 == 3 and manager is TwoTierCache else None,
        computes=seed % 4 == 3,
        cost=simulated_cost(MODEL, MACHINE, chunk_tokens),
        max_batch_tokens=rng.choice([8, 24]),
        copy_ahead=rng.choice(["paper", "spare", "never"]),
    )
    seen, turns = [], {}
    for number in range(40):
        session = f"s{rng.randrange(6)}"
        turns[session] = turns.get(session, 0) + 1
        engine.submit(request(number, session, rng.randrange(1, 20), rng.randrange(1, 12), turns[session]))
        for _ in range(rng.randrange(30)):
            seen += engine.step(engine.clock.now_ns() + 100_000)
            if not engine.progressed:
                engine.clock.advance_to(engine.clock.now_ns() + 100_000)
            engine.cache.check()
    while engine.busy:
        seen += engine.step(None)
    return seen, engine.cache.counters, engine.scheduler.counters, engine.clock.now_ns(), engine.counters.compute_ns


def test_the_same_results_to_the_bit(monkeypatch):
    """Of the build that the user has; nothing is compiled here, which takes a minute."""
    monkeypatch.setenv(compiled.SWITCH, "1")
    if not (compiled.builds() / compiled.key()).is_dir():
        pytest.skip("these sources are not compiled on this machine: python runners/compile.py")
    ask = (
        "import json; from pensieve.compiled import in_use; from tests.test_compiled import outcomes; "
        "assert in_use(); print(json.dumps(outcomes()))"
    )
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(
        [sys.executable, "-c", ask],
        cwd=CHECKOUT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not compiled.in_use(), "this process is the other side"
    assert json.loads(done.stdout) == outcomes()
