from __future__ import annotations

import pytest

from pensieve.device.asked import ModelAsked
from pensieve.device.model import LoadedModel, load_model
from pensieve.lab.bench.restore import Returning
from pensieve.plugins.device.thread_link import ThreadLink
from tests.worker.torch.driver import tiny_spec


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    spec = tiny_spec("llama", vocab_size=300, max_position_embeddings=2048)
    return load_model(ModelAsked(spec, threads=1))


def test_a_conversation_returns_from_the_cpu_as_often_as_it_is_asked(model: LoadedModel) -> None:
    link = ThreadLink()
    returning = Returning(model, 256, 8, 64, link)
    returning.fill()
    link.throttle(returning.tokens * model.spec.kv_bytes_per_token / 0.2)
    returning.set_cost_model()
    split = returning.split()
    assert split.load_s >= 0.19, "the profile measures the link as it is"
    assert split.predicted_s <= min(split.load_s, split.recompute_s)
    assert returning.ttft_ms("load") > 0.75e3 * 0.2, "a slow link holds the copies back"
    assert returning.ttft_ms("hybrid") > 0 and returning.ttft_ms("recompute") > 0
    assert returning.hit_ms() > 0
    link.throttle(None)
    returning.set_cost_model()
    assert returning.split().load_s < split.load_s / 2, "the profile measures the link as it is now"
    returning.close()
