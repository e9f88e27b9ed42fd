import platform
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from pensieve import compiler
from pensieve.compiler import load_library, processor
from pensieve.device.model import LoadedModel

from .driver import PROCESSORS, tiny_model


@pytest.fixture(scope="session")
def model_of() -> Callable[..., LoadedModel]:
    """The tiny model of an architecture, model_of(name, fused=False) on transformers' modules; loaded once, never changed."""
    return cache(tiny_model)


@pytest.fixture
def llama(model_of: Callable[..., LoadedModel]) -> LoadedModel:
    return model_of("llama")


@pytest.fixture
def compile_for(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], None]]:
    """What C is loaded from then on is compiled for this one of PROCESSORS. Skips where it cannot be or cannot run."""

    def chosen(name: str) -> None:
        options, needed = PROCESSORS[name]
        if platform.machine() != "x86_64" or not needed <= set(processor().split()):
            pytest.skip(f"this machine does not run what is compiled for {name}")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp()))  # compiled once for all tests
        monkeypatch.setattr(compiler, "_ATTEMPTS", ((*options, "-fopenmp-simd"),))
        load_library.cache_clear()

    yield chosen
    load_library.cache_clear()
