"""What devices and memory cost, and whether keeping KV has paid for itself.

A second of prefill saved is a second of all GPUs and worth what they cost; a GiB·s costs what its tier does. Without prices
nothing is said: seconds and GiB·s have no exchange.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

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
