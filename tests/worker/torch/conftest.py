from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from pensieve.device.model import LoadedModel

from .driver import ARCHITECTURES, tiny_model


@pytest.fixture(scope="session")
def model_of() -> Callable[..., LoadedModel]:
    """The tiny model of an architecture, model_of(name, fused=False) on transformers' modules; loaded once, never changed."""
    return cache(tiny_model)


@pytest.fixture(params=[(name, fused) for name in sorted(ARCHITECTURES) for fused in (True, False)], ids=str)
def model(request: pytest.FixtureRequest, model_of: Callable[..., LoadedModel]) -> LoadedModel:
    """Every architecture on both of its forwards, each with another of the backends that a CPU has."""
    name, fused = request.param
    return model_of(name, fused=fused, attention="auto" if fused else "reference")


@pytest.fixture
def llama(model_of: Callable[..., LoadedModel]) -> LoadedModel:
    return model_of("llama")
