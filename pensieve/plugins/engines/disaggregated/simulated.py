"""The disaggregated baselines on a simulated machine: bytes from the shapes of the model, seconds from bytes and rates.

Nothing is sent. The sizes of messages are those of wire.py for the model's own shapes, so that they are what a trial
would count, but for what no ModelSpec has: the norms and biases among the weights (below 0.1 %) and their names in the head.
Compute is what the machine's cost model says of the iteration; a message takes its bytes over hardware.network_gbps and
hardware.network_latency_s. Neither direction carries two messages at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

from pensieve.errors import ConfigError
from pensieve.plugins.engines.base import kv_settings
from pensieve.plugins.engines.disaggregated import wire as messages
from pensieve.plugins.engines.disaggregated.wire import KV, LOGITS, Array
from pensieve.plugins.engines.token_by_token import Spent, TokenByToken
from pensieve.specs import HardwareSpec, ModelSpec

_WORST = (1.0, 1.0)  # seconds that take as many bytes as any in a head


class _Disaggregated(TokenByToken):
    """One request after the other, in order of arrival, as the real ones are served."""

    def __init__(self, model: ModelSpec, hardware: HardwareSpec, chunk_tokens: int) -> None:
        if hardware.network_gbps is None:
            raise ConfigError(
                "hardware.network_gbps has no value, and a disaggregated baseline on a simulated machine needs it; set it."
            )
        super().__init__(model, hardware, chunk_tokens)
        self._bytes_s = hardware.network_gbps * 1e9 / 8

    def settings(self) -> dict[str, Any]:
        h = self.hardware
        return {
            "engine": "simulated, disaggregated",
            "device": h.name,
            **kv_settings(None, self.model.kv_bytes_per_token, self.model.dtype),
            "network": f"simulated: {h.network_gbps:g} Gbps each way and {h.network_latency_s * 1e6:g} us one way",
            "network_gbps": h.network_gbps,
            "network_latency_s": h.network_latency_s,
            "bytes": "computed from the shapes of the model",
            "weight_bytes": self.model.weight_bytes,
        }

    def flight_ns(self, size: int) -> int:
        return round((size / self._bytes_s + self.hardware.network_latency_s) * 1e9)


class PartiallyAware(_Disaggregated):
    """See client.PartiallyAware."""

    weights_cross = False

    def tokens(self, held: int, prompt: int, count: int) -> Iterator[Spent]:
        context, new = 0, prompt
        for _ in range(count):
            kv = {KV: messages.kv_array(self.model, context)} if context else {}
            sent = messages.size(messages.step(_ids(new)), kv)
            if self.weights_cross:
                sent += self.model.weight_bytes
            back: dict[str, Array] = {LOGITS: messages.logits_array(self.model)}
            received = messages.size(
                messages.stepped(*_WORST), {**back, KV: messages.kv_array(self.model, context + new)}
            )
            flights = self.flight_ns(sent) + self.flight_ns(received)
            yield Spent(self.computed_ns(context, new), flights, sent, received)
            context, new = context + new, 1


class SemanticBlind(PartiallyAware):
    """See client.SemanticBlind."""

    weights_cross = True


class FullyAware(_Disaggregated):
    """See client.FullyAware. A token travels while the next is computed: only the first and the way of the prompt are waited
    for."""

    def tokens(self, held: int, prompt: int, count: int) -> Iterator[Spent]:
        asked = messages.size(messages.generate(_ids(prompt), count, [self.model.vocab]))
        context, new = 0, prompt
        for number in range(1, count + 1):
            said = messages.token(self.model.vocab)
            if number == count:
                said = messages.last_token(self.model.vocab, *_WORST)
            received = messages.size(said)
            first = number == 1
            moved = self.flight_ns(asked) + self.flight_ns(received) if first else 0
            yield Spent(self.computed_ns(context, new), moved, asked if first else 0, received)
            context, new = context + new, 1


def _ids(count: int) -> array[int]:
    return array("i", [0] * count)
