"""A CPU tier for vLLM 0.32 on a CPU, where its own copies refuse to work: OffloadingConnector's `spec_name=HostSpec`.

Everything above the copies is vLLM's.
"""

import time

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostWorker(OffloadingWorker):
    """Copies whole blocks at once: both tiers are the same memory."""

    def __init__(self, kv_caches, blocks_per_chunk, chunks):  # type: ignore[no-untyped-def]
        self._device = [cache.tensor for cache in kv_caches.tensors]
        self._host = [torch.zeros((chunks * blocks_per_chunk, one.shape[1]), dtype=one.dtype) for one in self._device]
        self._per = blocks_per_chunk
        self._over: list[TransferResult] = []

    def submit_store(self, job_id, src_spec, dst_spec) -> bool:  # type: ignore[no-untyped-def]
        return self._copy(job_id, src_spec, dst_spec, to_host=True)

    def submit_load(self, job_id, src_spec, dst_spec) -> bool:  # type: ignore[no-untyped-def]
        return self._copy(job_id, dst_spec, src_spec, to_host=False)

    def get_finished(self):  # type: ignore[no-untyped-def]
        over, self._over = self._over, []
        return over

    def wait(self, job_ids) -> None:  # type: ignore[no-untyped-def]
        return  # a job is done when it was submitted

    def _copy(self, job_id, blocks, chunks, to_host) -> bool:  # type: ignore[no-untyped-def]
        began, moved, per = time.perf_counter(), 0, self._per
        skipped = blocks.block_indices[0] % per  # blocks of the first chunk that the device has
        places = range(skipped, skipped + len(blocks.block_ids))
        at_host = torch.tensor([int(chunks.block_ids[place // per]) * per + place % per for place in places])
        at_device = torch.tensor(blocks.block_ids.tolist())
        for device, host in zip(self._device, self._host, strict=True):
            if to_host:
                host[at_host] = device[at_device]
            else:
                device[at_device] = host[at_host]
            moved += len(places) * device.shape[1] * device.element_size()
        self._over.append(TransferResult(job_id, True, moved, time.perf_counter() - began))
        return True


class HostSpec(CPUOffloadingSpec):
    BLOCK_SIZE_ALIGNMENT = 1  # no pages are pinned, so none need be whole

    def get_worker(self, kv_caches):  # type: ignore[no-untyped-def]
        return HostWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)  # type: ignore[no-untyped-call]
