"""A checked engine on a tiny model with a disk tier, and ways to damage its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from pensieve.core.cache.base import LowerTier
from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.policies.lru import Lru
from pensieve.core.request import Length, Request, TokenArray
from pensieve.core.scheduler.scheduler import SchedulerSettings
from pensieve.device.worker import TorchOptions
from pensieve.plugins.tiers.disk import DiskTier
from pensieve.plugins.tiers.disk_transfer import DiskOptions
from pensieve.serve.record import TurnRecord
from pensieve.sim.profile import Profile
from tests.exact import CheckedEngine
from tests.simulated import policy_context
from tests.test_exactness import load
from tests.worker.torch.driver import random_tokens

CHUNK = 8
COST = Profile(CHUNK, {128: 0.128, 256: 0.256}, 0.001, {})
OURS, OTHERS = bytes(32), bytes(31) + b"1"


class Talk:
    """The next turns of conversations, each token compared with the plain model; a disk that takes no time."""

    def __init__(
        self,
        folder: Path,
        name: str = "llama",
        gpu: int = 20,
        cpu: int = 10,
        disk_blocks: int = 60,
        identity: bytes = OURS,
        below: LowerTier | None = None,
        make: type[TwoTierCache] = TwoTierCache,
    ) -> None:
        self.path = folder / "pool.kv"
        cache = make(policy=Lru(policy_context(CHUNK, gpu, cpu)), chunk_tokens=CHUNK, gpu_blocks=gpu, cpu_blocks=cpu)
        below = below or DiskTier(disk_blocks, transfer=DiskOptions(self.path, folder, identity, disk_blocks))
        assert below.transfer is not None
        options = TorchOptions(transfer=below.transfer)
        self.engine = CheckedEngine(load(name), cache, SchedulerSettings(max_batch_tokens=64), 512, options=options)
        report = replace(self.engine.report, below_load_s=0.0)
        cache.begin(cost=COST, layers=2, batch_tokens=64, below=below, report=report)
        self.cache, self._numbers = cache, 0

    @property
    def disk(self) -> DiskTier:
        assert isinstance(self.cache.below, DiskTier)
        return self.cache.below

    def request(self, name: str, tokens: int, output: int = 4, **fields: Any) -> Request:
        self._numbers += 1
        prompt = fields.pop("prompt", None)  # whole; without, a message follows what the conversation holds
        if prompt is None:
            message, held = random_tokens(tokens, self._numbers), self.cache.sessions.get(name)
            prompt = message if held is None else held.tokens + message
        return Request(self._numbers, name, self._numbers, prompt, Length(output), **fields)

    def ask(self, name: str, tokens: int = 5, output: int = 4, **fields: Any) -> TurnRecord:
        self.engine.submit(self.request(name, tokens, output, **fields))
        [record] = self.engine.run()
        hits = [record.gpu_hit_tokens, record.cpu_hit_tokens, record.disk_hit_tokens, record.recomputed_tokens]
        assert record.status == "completed" and sum(hit or 0 for hit in hits) == record.history_tokens
        beyond = (record.new_tokens or 0) - (record.shared_hit_tokens or 0)
        assert sum(miss.stop - miss.start for miss in record.missed) == (record.recomputed_tokens or 0) + beyond
        return record

    def tokens(self, name: str) -> TokenArray[int]:
        known = self.cache.sessions.get(name)
        assert known is not None
        return known.tokens[:]

    def close(self) -> None:
        self.engine.torch_worker.close()
