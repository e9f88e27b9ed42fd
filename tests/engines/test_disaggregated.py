"""A model in another process than its client: the tokens of generate, and every byte and second accounted for.

The model's side runs in a thread of the test, behind real pipes; one test at the end has it in a process of its own.
"""

from __future__ import annotations

import os
import signal
import threading
from array import array
from dataclasses import replace
from multiprocessing import Pipe
from typing import Any

import psutil
import pytest

from pensieve.core.request import Free, Request
from pensieve.errors import WorkerError
from pensieve.plugins.engines import remote_model, simulated
from pensieve.plugins.engines.base import OutsideSystem
from pensieve.plugins.engines.disaggregated import FullyAware, PartiallyAware, SemanticBlind
from pensieve.plugins.engines.remote_model import RemoteModel, tensor_of, weight_arrays
from pensieve.plugins.engines.weights import plain_module
from pensieve.plugins.engines.wire import LOGITS, PIECE_BYTES, Array, Wire, size
from pensieve.serve.record import TurnRecord
from pensieve.specs import HardwareSpec
from tests.engines.small import ARCHITECTURES, ask, begun, greedy, prompt, served, setup_of

KINDS = (FullyAware, PartiallyAware, SemanticBlind)


def in_thread(kind: type[Any]) -> type[Any]:
    class InThread(kind):  # type: ignore[misc]
        def _begin(self, asked: Any) -> Any:
            (hears, commands), (answers, tells) = Pipe(duplex=False), Pipe(duplex=False)
            threading.Thread(target=remote_model.host, args=(hears, tells), daemon=True).start()
            commands.send(asked)
            return answers.recv(), Wire(answers, commands, self._setup.network_gbps)

    return InThread


def opened(kind: type[Any], **changes: Any) -> OutsideSystem:
    return begun(in_thread(kind)(changes.pop("setup", None) or setup_of(**changes)))


def one(system: OutsideSystem, tokens: array[int], output: int = 6, number: int = 1, **fields: Any) -> TurnRecord:
    [turn] = served(system, ask(number, f"s{number}", tokens, output, **fields))
    assert turn.status == "completed", turn.error
    return turn


@pytest.mark.parametrize(
    ("family", "dtype", "kind"),
    [
        ("gpt2", "float32", FullyAware),
        ("opt", "float32", PartiallyAware),
        ("wide_llama", "bfloat16", PartiallyAware),
        ("tied_llama", "float32", SemanticBlind),
        ("wide_llama", "bfloat16", SemanticBlind),
    ],
)
def test_the_tokens_are_those_of_generate_and_the_parts_of_a_turn_within_it(
    family: str, dtype: str, kind: type[Any]
) -> None:
    setup = setup_of(family)
    setup = replace(setup, model=replace(setup.model, dtype=dtype))
    module, system = plain_module(setup), opened(kind, setup=setup)
    for number, length in enumerate((40, 7)):
        turn = one(system, prompt(length), 8, number, intended_s=system.clock.now_s())
        assert list(turn.token_ids) == greedy(module, prompt(length), 8)
        assert len(turn.emitted_s) == 8
        assert turn.queue_ms >= 0 and turn.compute_ms > 0 and turn.transfer_ms > 0  # type: ignore[operator]
        assert turn.queue_ms + turn.compute_ms + turn.transfer_ms <= (turn.latency_ms or 0) + 0.01  # type: ignore[operator]


def test_a_large_array_arrives_whole_and_is_counted_alike_at_both_ends() -> None:
    hears, tells = Pipe(duplex=False)
    near, far = Wire(hears, tells), Wire(hears, tells)
    data = os.urandom(2 * PIECE_BYTES + 12)
    given = {"a": Array("float32", (len(data) // 4,), data)}
    sending = threading.Thread(target=near.send, args=({"x": 1}, given))
    sending.start()
    arrived = far.receive()
    sending.join()
    assert arrived.said == {"x": 1} and bytes(arrived.arrays["a"].data) == data
    assert near.sent_bytes == far.received_bytes == size({"x": 1}, given) > len(data)


def test_the_blind_ones_weights_come_with_each_step_and_are_gone_after_it() -> None:
    import torch

    setup = setup_of("tied_llama")
    weights, model = weight_arrays(plain_module(setup)), RemoteModel(setup, keeps_weights=False)
    with pytest.raises(KeyError):
        model.step(prompt(8), {})
    doubled = {
        name: replace(each, data=bytearray(tensor_of(each).mul(2).numpy().tobytes())) for name, each in weights.items()
    }
    back, other = (tensor_of(model.step(prompt(8), given)[0][LOGITS]) for given in (weights, doubled))
    assert not torch.equal(back, other), "it computes with what it was given"
    assert [parameter.numel() for parameter in model._module.parameters()] == [0] * len(weights)


def test_a_cap_holds_back_each_message_and_is_in_the_record() -> None:
    gbps = 0.004
    slow = opened(PartiallyAware, network_gbps=gbps)
    fast, paced = one(opened(PartiallyAware), prompt(60), 4), one(slow, prompt(60), 4)
    assert fast.token_ids == paced.token_ids
    assert abs((fast.sent_bytes or 0) - (paced.sent_bytes or 0)) <= 8, "it takes longer, and is not more"
    least_ms = ((paced.sent_bytes or 0) + (paced.received_bytes or 0)) * 8 / (gbps * 1e9) * 1e3
    assert least_ms > 200 and (paced.transfer_ms or 0) >= least_ms
    assert slow.settings()["network_gbps"] == gbps


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_of_sequence_ends_it_and_a_cancelled_request_leaves_the_next_alone(kind: type[Any]) -> None:
    module = plain_module(setup_of())
    tokens = greedy(module, prompt(60), 8)
    system = opened(kind, eos=frozenset({tokens[3]}))
    [turn] = served(system, Request(1, "a", 1, prompt(60), Free(8)))
    assert list(turn.token_ids) == tokens[: tokens.index(tokens[3]) + 1] and turn.finish_reason == "eos"
    for number in range(2, 12):  # a busy machine may come too late once, and hear the whole reply
        system.submit(ask(number, "b", prompt(40), output=900))
        while not system.poll(system.clock.now_s() + 0.01):  # until it has a first token
            pass
        system.cancel(number, "timeout")
        ended: list[TurnRecord] = []
        while not ended:
            ended = [event.turn for event in system.poll(None) if event.turn is not None]
        if ended[0].status != "completed":
            break
    assert ended[0].status == "timeout" and 0 < ended[0].output_tokens < 900
    [after] = served(system, ask(20, "c", prompt(30), output=5))
    assert list(after.token_ids) == greedy(module, prompt(30), 5)
    [long] = served(system, ask(21, "a", prompt(40), output=ARCHITECTURES["llama"]["max_position_embeddings"]))
    assert (long.status, long.finish_reason) == ("refused", "context") and long.sent_bytes is None


@pytest.mark.parametrize("kind", KINDS)
def test_the_simulation_counts_what_a_pipe_would_have_carried(kind: type[Any]) -> None:
    setup = setup_of()
    machine = HardwareSpec("m", True, flops=1e12, memory_bw=1e11, h2d_bw=1e10, network_gbps=25, network_latency_s=1e-5)
    told = list(getattr(simulated, kind.__name__)(setup.model, machine, 32).tokens(0, 40, 6))
    turn = one(opened(kind), prompt(40), 6)
    sent, received = sum(spent.sent for spent in told), sum(spent.received for spent in told)
    assert abs(received - (turn.received_bytes or 0)) <= 6 * 8
    missing = (turn.sent_bytes or 0) - sent
    if kind is SemanticBlind:  # norms, and what names the weights: known to a module, not to a ModelSpec
        norms = sum(part.numel() * 4 for part in plain_module(setup).parameters() if part.ndim == 1)
        assert 6 * norms < missing < 6 * (norms + 1500)
    else:
        assert abs(missing) <= 6 * 8


@pytest.mark.slow
def test_the_process_of_the_model_is_killed_and_leaves_a_sentence() -> None:
    engine = FullyAware(setup_of())
    system = begun(engine)
    assert one(system, prompt(12), 3).received_bytes
    assert engine._process is not None
    family = psutil.Process(engine._process.pid).children(recursive=True)
    model = next(child for child in family if "remote_model import host" in " ".join(child.cmdline()))
    os.kill(model.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="ended while it served requests"):
        one(system, prompt(12), 3, 2)
    system.close()
    assert not model.is_running() or model.status() == psutil.STATUS_ZOMBIE
