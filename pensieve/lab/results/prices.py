"""What devices and memory cost, and whether keeping KV has paid for itself.

A second of prefill saved is a second of all GPUs and worth what they cost; a GiB·s costs what its tier does. Without prices
nothing is said: seconds and GiB·s have no exchange.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from pensieve.core.plan import Tier
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

    @classmethod
    def of(cls, trial: Trial, prices: Prices) -> Worth | None:
        """None without prices, or where the trial does not say what a token takes."""
        if not prices.given or not trial.kv_bytes_per_token:
            return None
        return cls(prices, trial.device_count or 1)

    def paid_back(self, saved_s: float, idle_gib_s: float, tier: Tier) -> float | None:
        """What was saved over what it cost to keep; 1: even. None: nothing was kept, or there is no price."""
        prices = self.prices
        price = {"gpu": prices.gpu_gib_hour, "cpu": prices.cpu_gib_hour, "disk": prices.disk_gib_hour}[tier]
        if not price or not prices.gpu_hour or not idle_gib_s:
            return None
        return saved_s * (prices.gpu_hour * self.devices / price) / idle_gib_s
