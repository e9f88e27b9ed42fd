import gc
import weakref

from pensieve.worker.torch.shelf import open_shelf, take_model
from tests.worker.torch.driver import tiny_spec


def take(seed=0):
    return take_model(tiny_spec("llama"), "random", None, None, seed, "cpu", 1)


def test_an_open_shelf_gives_the_same_model_and_keeps_one():
    with open_shelf():
        first = take()
        assert take() is first
        assert take(seed=1) is not first
        assert take() is not first  # the other took its place


def test_without_a_shelf_every_trial_loads_its_own():
    with open_shelf():
        first = take()
    assert take() is not first
    assert take() is not take()


def test_a_model_leaves_memory_before_the_next_one_comes():
    """Also where a circle of references holds it, as the frame does in which transformers was imported first."""
    with open_shelf():
        model = take(0)
        first = weakref.ref(model.module)
        gc.disable()
        try:
            circle = [model.module]
            circle.append(circle)
            del circle, model
            take(1)
        finally:
            gc.enable()
        assert first() is None
