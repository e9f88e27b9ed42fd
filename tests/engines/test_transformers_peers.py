"""transformers as an engine: the tokens of plain decoding."""

import logging

import pytest

from pensieve.core.request import Free, Request
from pensieve.plugins.engines.base import OutsideSystem
from pensieve.plugins.engines.transformers_peers import ContinuousBatching, NativePytorch
from pensieve.plugins.engines.weights import plain_module
from tests.engines.small import ask, begun, greedy, prompt, served, setup_of


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_generate_gives_the_tokens_of_plain_decoding_over_three_turns(family: str) -> None:
    module = plain_module(setup_of(family))
    expected = greedy(module, prompt(60), 8)
    system = begun(NativePytorch(setup_of(family, eos=frozenset({expected[3]}))))
    said = prompt(40)
    for turn in (1, 2, 3):
        [record] = served(system, ask(turn, "a", said, output=6, turn=turn))
        assert list(record.token_ids) == greedy(module, said, 6)
        history = 0 if turn == 1 else len(said) - 9 - 1
        assert record.history_tokens == history
        assert (record.gpu_hit_tokens, record.recomputed_tokens) == (0, history)
        assert len(record.emitted_s) == 6 and record.queue_ms is not None
        said = said + record.token_ids + prompt(9, start=turn)
    _ends(system, expected)


def test_continuous_batching_gives_the_same_tokens_with_the_kv_of_the_others_and_prints_nothing() -> None:
    """Side by side, up to an end of sequence, and as long as all of its KV, twice: the first gives way. Its logger has a
    handler of its own, and the level of the root, which is INFO in a trial."""
    root, own = logging.getLogger(), logging.getLogger("ContinuousBatchingLogger")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    levels = root.level, own.level
    root.setLevel(logging.INFO)
    own.addHandler(handler)
    try:
        module = plain_module(setup_of())
        expected = greedy(module, prompt(60), 8)
        setup = setup_of(kv_tokens=256, batch_tokens=64, eos=frozenset({expected[3]}))
        system = begun(ContinuousBatching(setup))
        assert system.settings()["gpu_tokens"] == 256
        lengths = (40, 40, 40, 240, 240)
        prompts = [prompt(length, start=start) for start, length in enumerate(lengths, 1)]
        asked = [ask(number, f"s{number}", one, output=6) for number, one in enumerate(prompts)]
        together, *long = served(system, *asked[:3]), served(system, asked[3]), served(system, asked[4])
        for turn, one in zip([*together, *(turns[0] for turns in long)], prompts, strict=True):
            assert list(turn.token_ids) == greedy(module, one, 6)
            assert turn.gpu_hit_tokens is None, "it does not say"
            assert turn.ttft_ms is not None and 0 < turn.ttft_ms <= turn.latency_ms  # type: ignore[operator]
            assert len(turn.emitted_s) == 6
        _ends(system, expected)
        system.close()
        assert said == [] and own.level == levels[1]
    finally:
        own.removeHandler(handler)
        root.setLevel(levels[0])


def _ends(system: OutsideSystem, expected: list[int]) -> None:
    """A free output, by its end of sequence."""
    [turn] = served(system, Request(9, "free", 1, prompt(60), Free(8)))
    assert list(turn.token_ids) == expected[: expected.index(expected[3]) + 1] and turn.finish_reason == "eos"
