import pytest

from tests.exact import CheckedEngine, Mismatch
from tests.soak import Episode, soak


@pytest.mark.slow
def test_a_hundred_turns_agree_with_the_plain_model(capsys):
    assert soak(120, seed=7) == 0
    out = capsys.readouterr().out
    assert "by path" in out


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
