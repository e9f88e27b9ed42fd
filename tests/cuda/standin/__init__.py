"""A CUDA device that is not there: cuda:0 over real values in RAM, with the rules of CUDA that a run on a CPU cannot see.

Every tensor on it wraps a CPU tensor, and every operation is performed at once, in the order of the program. So values
are right, and what a real device might do in another order is found by clocks instead of by luck:

clocks.py     streams and host threads as vector clocks; memory that knows who touched it last; what is found, and where
machine.py    the device: its memory, its streams, the capture under way, and what was found
tensors.py    a tensor on it
operations.py performs torch's operations on such tensors, and tells the machine what they read and write
streams.py    streams and events, which are reached some queries after they were recorded; captures and their replays
kernels.py    this project's Triton kernels in torch's arithmetic, and the driver's batched copy
install.py    stand_in(): all of it in place of torch.cuda, for the time of a `with`

Findings, by kind:
race      memory touched with nothing that orders it behind its last write (or a write behind its last reads)
torn      a kernel read a byte of a block that was overwritten while it was copied
pageable  a copy that was not to wait, from or to memory that is not pinned: CUDA waits all the same
capture   inside a capture: something that waits, host memory that a replay would read again, pinned memory allocated
freed     a replay that touches memory which was freed since
What waits for the device (.item(), .cpu(), a copy without non_blocking, a mask as index, synchronize) is listed apart, in
`syncs`. Tensors of both devices in one operation, a shortage of memory and whatever waits in a capture raise, as on CUDA.

Not shown: time, the kernels' own code (Triton's interpreter and compiler have tests for that), cuBLAS, the driver.
"""
