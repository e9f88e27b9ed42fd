import gc
import weakref
from dataclasses import replace

from pensieve.device.asked import ModelAsked
from pensieve.plugins.device.shelf import empty, kept_host_bytes, open_shelf, take_model
from tests.worker.torch.driver import tiny_spec

LLAMA = tiny_spec("llama")


def take(spec=LLAMA, **asked):
    return take_model(ModelAsked(spec, threads=1, **asked))


def test_a_folder_that_was_written_again_is_loaded_again(tmp_path):
    take().module.save_pretrained(tmp_path)
    with open_shelf():
        for changed, reused in ((False, False), (False, True), (True, False)):
            if changed:
                take(seed=1).module.save_pretrained(tmp_path)
            assert take(weights=str(tmp_path)).reused is reused


def test_what_decides_a_model_loads_another():
    """dtype is the spec's; attention and the blocks' size decide what was checked. Each differs from the
    one before it, which alone is kept."""
    small = tiny_spec("llama", num_hidden_layers=1)
    half = replace(small, dtype="bfloat16")
    asked = [
        (small, {"attention": "reference"}),
        (small, {"attention": "reference", "chunk_tokens": 16}),
        (half, {"attention": "reference", "chunk_tokens": 16}),
        (half, {"chunk_tokens": 16}),
    ]
    with open_shelf():
        found = [take(spec, **how).reused for spec, how in asked for _ in range(2)]
    assert found == [False, True] * len(asked)


def test_what_is_kept_counts_as_free_and_leaves_memory_before_the_next_one_comes():
    """Also where a circle of references holds it, as the frame does in which transformers was imported first."""
    assert kept_host_bytes() == 0
    with open_shelf():
        model = take()
        assert kept_host_bytes() == sum(p.nbytes for p in (*model.module.parameters(), *model.module.buffers())) > 0
        first = weakref.ref(model.module)
        gc.disable()
        try:
            circle = [model.module]
            circle.append(circle)
            del circle, model
            take(seed=1)
        finally:
            gc.enable()
        assert first() is None
        empty()
        assert kept_host_bytes() == 0 and not take().reused
    assert kept_host_bytes() == 0
