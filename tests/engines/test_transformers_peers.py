"""transformers as an engine: the tokens of plain decoding."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from pensieve.core.request import Free, Request
from pensieve.plugins.engines.transformers_peers import ContinuousBatching, NativePytorch
from pensieve.plugins.engines.weights import plain_module
from tests.engines.small import ask, begun, greedy, prompt, served, setup_of


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_generate_gives_the_tokens_of_plain_decoding_over_three_turns(family: str) -> None:
    module, system = plain_module(setup_of(family)), begun(NativePytorch(setup_of(family)))
    said = prompt(40)
    for turn in (1, 2, 3):
        [record] = served(system, ask(turn, "a", said, output=6, turn=turn))
        assert list(record.token_ids) == greedy(module, said, 6)
        history = 0 if turn == 1 else len(said) - 9 - 1
        assert record.history_tokens == history
        assert (record.gpu_hit_tokens, record.recomputed_tokens) == (0, history)
        assert len(record.emitted_s) == 6 and record.queue_ms is not None
        said = said + record.token_ids + prompt(9, start=turn)


def test_continuous_batching_gives_the_same_tokens_side_by_side_and_prints_nothing_into_a_trials_table() -> None:
    """Its logger has a handler of its own, and the level of the root, which is INFO in a trial."""
    root, own = logging.getLogger(), logging.getLogger("ContinuousBatchingLogger")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    levels = root.level, own.level
    root.setLevel(logging.INFO)
    own.addHandler(handler)
    try:
        module, system = plain_module(setup_of()), begun(ContinuousBatching(setup_of()))
        prompts = [prompt(40, start=start) for start in (1, 2, 3)]
        turns = served(system, *(ask(number, f"s{number}", one, output=6) for number, one in enumerate(prompts)))
        for turn, one in zip(turns, prompts, strict=True):
            assert list(turn.token_ids) == greedy(module, one, 6)
            assert turn.gpu_hit_tokens is None, "it does not say"
            assert turn.ttft_ms is not None and 0 < turn.ttft_ms <= turn.latency_ms  # type: ignore[operator]
            assert len(turn.emitted_s) == 6
        system.close()
        assert said == [] and own.level == levels[1]
    finally:
        own.removeHandler(handler)
        root.setLevel(levels[0])


@pytest.mark.parametrize("kind", [NativePytorch, ContinuousBatching])
def test_a_free_output_ends_with_its_end_of_sequence(kind: type[Any]) -> None:
    tokens = greedy(plain_module(setup_of()), prompt(60), 8)
    system = begun(kind(setup_of(eos=frozenset({tokens[3]}))))
    [turn] = served(system, Request(1, "a", 1, prompt(60), Free(8)))
    assert list(turn.token_ids) == tokens[: tokens.index(tokens[3]) + 1] and turn.finish_reason == "eos"


def test_continuous_batching_has_the_kv_of_the_others_and_no_more() -> None:
    """A conversation as long as all of it, then one that fits only where the first gives way."""
    module, system = plain_module(setup_of()), begun(ContinuousBatching(setup_of(kv_tokens=256, batch_tokens=64)))
    assert system.settings()["gpu_tokens"] == 256
    for number, start in enumerate((1, 2)):
        [turn] = served(system, ask(number, f"s{number}", prompt(240, start=start), output=6))
        assert list(turn.token_ids) == greedy(module, prompt(240, start=start), 6)
