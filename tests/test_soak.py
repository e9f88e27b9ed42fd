from __future__ import annotations

import pytest

from pensieve.core.cache.two_tier import TwoTierCache
from tests.exact import CheckedEngine, Mismatch
from tests.soak import Episode, soak


@pytest.mark.slow
def test_two_hundred_turns_agree_with_the_plain_model(capsys):
    assert soak(200, seed=7) == 0
    out = capsys.readouterr().out
    assert "turns by path" in out


@pytest.mark.slow
def test_a_stale_read_is_found_and_printed(monkeypatch, capsys):
    """A cache that forgets to swap in: the worker reads blocks that hold NaN."""
    admit = TwoTierCache.admit

    def careless(self, *args):
        admission = admit(self, *args)
        kept = admission.work[1:] if len(admission.work) > 1 else admission.work  # skips what was dropped
        return admission._replace(work=kept)

    monkeypatch.setattr(TwoTierCache, "admit", careless)
    assert soak(600, seed=5) == 1
    out = capsys.readouterr().out
    assert "Mismatch" in out and "logits" in out
    assert "Episode(5," in out


def test_a_wrong_logit_is_a_mismatch(monkeypatch):
    episode = Episode(0, 0)
    original = CheckedEngine._emit

    def off(self, active, token, now_s):
        logits = self.torch_worker.last_logits
        logits[active.slot] = logits[active.slot] + 0.01
        original(self, active, token, now_s)

    monkeypatch.setattr(CheckedEngine, "_emit", off)
    with pytest.raises(Mismatch, match="logits"):
        episode.run(episode.operations(5))
