from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from pensieve.worker.torch.model import LoadedModel

from .driver import ARCHITECTURES, tiny_model


@pytest.fixture(scope="session")
def model_of() -> Callable[[str], LoadedModel]:
    """The tiny model of an architecture; loaded once, never changed."""
    return cache(tiny_model)


@pytest.fixture(params=sorted(ARCHITECTURES))
def model(request: pytest.FixtureRequest, model_of: Callable[[str], LoadedModel]) -> LoadedModel:
    return model_of(request.param)


@pytest.fixture
def llama(model_of: Callable[[str], LoadedModel]) -> LoadedModel:
    return model_of("llama")
