"""Copies of KV blocks between the GPU tier and the CPU tier.

transfer.py     Transfer: performs the copies of plans, lets each layer's attention wait for its loads, and reports tickets
link.py         what the other files agree on: runs of blocks, and the protocols Copier, Mark, Lane and Link
lanes.py        the two links: CUDA streams with events, and threads that stand in for them on a CPU
copies.py       the ways to copy over a GPU's link: a call a run, a call a layer, our kernel, or both by run length
driver.py       CUDA's batched copy (cuMemcpyBatchAsync), called through ctypes, since torch does not offer it
choice.py       which of those ways a worker uses on this machine
measurement.py  what that choice is based on: times of each way beside compute, and a check that every byte arrives
pinned.py       page-locked RAM of exact size, and small arrays sent to the device without waiting
"""
