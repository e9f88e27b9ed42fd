"""What devices and memory cost, and what keeping KV is worth: break-even idle times, and whether it has paid for itself.

A second of prefill saved is a second of all GPUs and worth what they cost; a GiB·s costs what its tier does. Without prices
nothing is said: seconds and GiB·s have no exchange.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from pensieve.core.plan import Tier
from pensieve.lab.metrics import MetricValue
from pensieve.lab.results.schema import Trial
from pensieve.units import GIB


class Prices(BaseModel):
    """Of an hour: of one device, and of one GiB of KV in each tier; None: not given."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpu_hour: float | None = Field(None, ge=0.0)
    gpu_gib_hour: float | None = Field(None, ge=0.0)
    cpu_gib_hour: float | None = Field(None, ge=0.0)
    disk_gib_hour: float | None = Field(None, ge=0.0)

    @property
    def given(self) -> bool:
        return any(value is not None for value in self.model_dump().values())

    def an_hour(self, devices: int, gpu_bytes: int, cpu_bytes: int, disk_bytes: int = 0) -> float:
        """What is not priced costs nothing."""
        memory = (self.gpu_gib_hour or 0.0) * gpu_bytes + (self.cpu_gib_hour or 0.0) * cpu_bytes
        return (self.gpu_hour or 0.0) * devices + (memory + (self.disk_gib_hour or 0.0) * disk_bytes) / GIB


@dataclass(frozen=True, slots=True)
class Worth:
    """Of one trial: the exchange between seconds of prefill and GiB·s."""

    prices: Prices
    devices: int
    token_gib: float

    @classmethod
    def of(cls, trial: Trial, prices: Prices) -> Worth | None:
        """None without prices, or where the trial does not say what a token takes."""
        if not prices.given or not trial.kv_bytes_per_token:
            return None
        return cls(prices, trial.device_count or 1, trial.kv_bytes_per_token / GIB)

    def gib(self, tier: Tier) -> float | None:
        """GiB·s of a tier that a second of prefill is worth; None: the tier or the GPUs have no price, or one is 0."""
        prices = self.prices
        price = {"gpu": prices.gpu_gib_hour, "cpu": prices.cpu_gib_hour, "disk": prices.disk_gib_hour}[tier]
        return self.prices.gpu_hour * self.devices / price if price and self.prices.gpu_hour else None

    def break_even_s(self, tokens: int, prefill_s: float, tier: Tier) -> float | None:
        """How long `tokens` of KV may be idle in a tier before keeping them costs more than computing them again."""
        worth = self.gib(tier)
        return None if worth is None else prefill_s * worth / (tokens * self.token_gib)

    def paid_back(self, saved_s: float, idle_gib_s: float, tier: Tier) -> float | None:
        """What was saved over what it cost to keep; 1: even. None: nothing was kept, or the tier has no price."""
        worth = self.gib(tier)
        return None if worth is None or not idle_gib_s else saved_s * worth / idle_gib_s


def prefill_seconds(metrics: Mapping[tuple[str, str], MetricValue]) -> dict[int, float]:
    """Tokens -> seconds that computing them from the first on takes, as the trial has recorded; ascending."""
    found = {int(one.label): one.value for one in metrics.values() if one.name == "prefill_s" and one.value is not None}
    return dict(sorted(found.items()))
