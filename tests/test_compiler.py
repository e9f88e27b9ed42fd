from pathlib import Path

import pytest

from pensieve import compiler
from pensieve.compiler import find_compiler, load_library
from pensieve.errors import EngineMissing

try:
    find_compiler()
except EngineMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)

_SOURCE = """
#include <omp.h>
int answer(void) { return ANSWER; }
int threads(int wanted) {
    int seen = 0;
#pragma omp parallel num_threads(wanted)
#pragma omp atomic
    seen++;
    return seen;
}
"""


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    load_library.cache_clear()
    yield tmp_path / "cache" / "pensieve" / "kernels"
    load_library.cache_clear()


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "answer.c"
    path.write_text(_SOURCE)
    return path


def _answer(source, answer):
    library = load_library(source, (f"ANSWER={answer}",))
    return int(library.functions.answer())


def test_compiled_once_and_kept(source, cache_folder, monkeypatch):
    assert _answer(source, 42) == 42
    made = list(cache_folder.iterdir())
    assert [path.suffix for path in made] == [".so"], "nothing else is left behind"
    load_library.cache_clear()
    monkeypatch.setattr(compiler, "_compile", lambda *_: pytest.fail("compiled again"))
    assert _answer(source, 42) == 42
    monkeypatch.undo()
    (source.parent / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(source.parent / "file"))  # a home that cannot be written to
    assert _answer(source, 7) == 7


def test_another_definition_source_or_processor_is_another_file(source, cache_folder, monkeypatch):
    assert (_answer(source, 1), _answer(source, 2)) == (1, 2)
    source.write_text(_SOURCE + "/* changed */")
    load_library.cache_clear()
    assert _answer(source, 1) == 1
    monkeypatch.setattr(compiler, "processor", lambda: "a machine with the same home")
    load_library.cache_clear()
    assert _answer(source, 1) == 1
    assert len(list(cache_folder.iterdir())) == 4


def test_it_shares_the_threads_of_torch(source):
    import torch

    torch.randn(2)
    if compiler.openmp_runtime() is None:
        pytest.skip("this torch was built without OpenMP")

    def runtimes():
        return {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}

    before = runtimes()  # other packages of this process may have brought their own
    library = load_library(source, ("ANSWER=0",))
    assert library.threads and library.functions.threads(3) == 3
    assert runtimes() == before


def test_no_compiler_and_a_broken_one_are_one_sentence(source, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(EngineMissing, match="CC=no-such-compiler is not one"):
        load_library(source, ())
    monkeypatch.delenv("CC")
    with monkeypatch.context() as nothing:
        nothing.setattr(compiler.shutil, "which", lambda name: None)
        with pytest.raises(EngineMissing, match=r"there is none \(install gcc or clang\)"):
            load_library(source, ())
    source.write_text("int answer(void) { return NOWHERE; }")
    with pytest.raises(EngineMissing, match=r"NOWHERE.*undeclared.*attention_backend=reference"):
        load_library(source, ())


def test_without_openmp_it_runs_on_one_thread(source, monkeypatch):
    monkeypatch.setattr(compiler, "openmp_runtime", lambda: None)
    source.write_text(_SOURCE.replace("#include <omp.h>", ""))
    library = load_library(source, ("ANSWER=5",))
    assert not library.threads and library.functions.threads(4) == 1


def test_small_numbers_stay_numbers():
    """Linking with -ffast-math would make the whole process flush denormal numbers to zero."""
    import torch

    from pensieve.device.kernels.native import NativeBackend

    NativeBackend(64)
    assert float(torch.tensor(1e-40) * 0.5) > 0
