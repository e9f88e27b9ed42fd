import gc
import weakref
from dataclasses import replace

from pensieve.device.asked import ModelAsked
from pensieve.plugins.device.shelf import empty, kept_host_bytes, open_shelf, take_model
from tests.worker.torch.driver import tiny_spec


def take(seed=0):
    return take_model(ModelAsked(tiny_spec("llama"), "random", None, None, seed, "cpu", 1))


def test_a_folder_that_was_written_again_is_loaded_again(tmp_path):
    first = take()
    first.module.save_pretrained(tmp_path)
    spec = tiny_spec("llama")
    with open_shelf():
        for changed, reused in ((False, False), (False, True), (True, False)):
            if changed:
                take(seed=1).module.save_pretrained(tmp_path)
            model = take_model(ModelAsked(spec, str(tmp_path), None, None, 0, "cpu", 1))
            assert model.reused is reused


def test_what_decides_a_model_loads_another():
    """dtype is the spec's; attention and the blocks' size decide what was checked. Each differs from the
    one before it, which alone is kept."""
    spec, plain = tiny_spec("llama", num_hidden_layers=1), ("random", None, None, 0, "cpu", 1)
    asked = [
        (spec, *plain, "reference"),
        (spec, *plain, "reference", 16),
        (replace(spec, dtype="bfloat16"), *plain, "reference", 16),
        (replace(spec, dtype="bfloat16"), *plain, "auto", 16),
    ]
    with open_shelf():
        assert [take_model(ModelAsked(*one)).reused for one in asked for _ in range(2)] == [False, True] * len(asked)


def test_what_is_kept_counts_as_free_for_the_next_trial():
    assert kept_host_bytes() == 0
    with open_shelf():
        model = take()
        assert kept_host_bytes() == sum(p.nbytes for p in (*model.module.parameters(), *model.module.buffers())) > 0
        empty()
        assert kept_host_bytes() == 0 and not take().reused
    assert kept_host_bytes() == 0


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
