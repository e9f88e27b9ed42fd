"""The file store of KV: one file of equal blocks, each of which says itself what it holds; imports no torch.

    block i     | header, 4 KiB or more | layer 0 | layer 1 | ... |     padded to whole pages

A header has the model it belongs to, the key of the chunk, a checksum of each layer, and a checksum of itself. A block is
written in the order: header of zeroes, layers, header. So a process that is killed at any moment leaves blocks that are whole
or empty, and whatever else happens to the file (a page that never reached the disk, a cut, a flipped bit, another model's
file in its place) shows in a checksum when it is read. There is no index beside the blocks that could disagree with them.
"""

import fcntl
import logging
import os
import struct
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from pensieve.errors import HardwareMissing

log = logging.getLogger(__name__)

_PAGE = 4096
_MAGIC = b"PNSVKV01"
_HEADER = struct.Struct("<8s32s16sQII")  # magic, identity, key, number of the write, layers, bytes of a layer
_PROBE_S = 0.25  # measure the disk for at least so long, where it is fast


class PoolFile:
    """Blocks of `layers` x `layer_bytes`. Calls of one thread at a time, but for `close`.

    kept: block by key of what the file holds from before for this identity, oldest first.
    """

    def __init__(
        self, path: Path | None, folder: Path, identity: bytes, blocks: int, layers: int, layer_bytes: int
    ) -> None:
        """path: None for a file that ends with the process, somewhere in `folder`. identity: 32 bytes that name model,
        weights, dtype and layout. Raises HardwareMissing where there is no room, or another process has the file."""
        assert len(identity) == 32
        self.blocks, self.layers, self.layer_bytes = blocks, layers, layer_bytes
        self._identity = identity
        self._header_bytes = _padded(_HEADER.size + 4 * layers + 4)
        self._stride = self._header_bytes + _padded(layers * layer_bytes)
        self._path = path or folder
        self._writes = 0
        try:
            self._file = self._open(path, folder)
        except OSError as error:
            raise HardwareMissing(f"The file of cache.disk cannot be opened: {error}; set cache.disk=0.") from error
        try:
            self._reserve()
            self.kept = self._scan()
        except BaseException:
            os.close(self._file)
            raise

    @staticmethod
    def _open(path: Path | None, folder: Path) -> int:
        if path is None:
            folder.mkdir(parents=True, exist_ok=True)
            temporary = folder / f".kv_{os.getpid()}_{time.monotonic_ns()}"
            file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            temporary.unlink()  # it goes when the process does, however that ends
            return file
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            raise HardwareMissing(
                f"{path} is in use by another server; set cache.disk=0 for this one, or PENSIEVE_OUTPUTS to another folder."
            ) from error
        return file

    def _reserve(self) -> None:
        """Raises HardwareMissing where the disk has less room than the blocks may come to take."""
        told, wanted = os.fstat(self._file), self.blocks * self._stride
        room = os.fstatvfs(self._file)
        free = room.f_bavail * room.f_frsize + told.st_blocks * 512
        if wanted > free:
            raise HardwareMissing(
                f"cache.disk takes {wanted / 1e9:.1f} GB and {self._path} has {free / 1e9:.1f} GB free; "
                "set a smaller cache.disk."
            )
        if told.st_size % self._stride:
            log.warning("%s is cut short, or not ours; what is damaged is not used.", self._path)
        os.ftruncate(self._file, wanted)  # a longer file's surplus goes, a shorter one's blocks are empty

    def _scan(self) -> Mapping[bytes, int]:
        found: list[tuple[int, bytes, int]] = []
        strange = 0
        for block in range(self.blocks):
            header = self._header_of(block)
            if told := self._told(header):
                found.append((told[1], told[0], block))
            else:
                strange += any(header[:8])
        if strange:
            log.warning("%s: %s chunks are of another model, or damaged; they are not used.", self._path, strange)
        self._writes = max((number for number, _, _ in found), default=0)
        kept: dict[bytes, int] = {}
        for _, key, block in sorted(found):
            kept.pop(key, None)
            kept[key] = block  # written twice: the newer one
        return kept

    def write(self, block: int, key: bytes, layers: Sequence[memoryview]) -> None:
        """Raises OSError."""
        self._writes += 1
        base = block * self._stride
        sums = [zlib.crc32(layer) for layer in layers]
        head = _HEADER.pack(_MAGIC, self._identity, key, self._writes, self.layers, self.layer_bytes)
        head += struct.pack(f"<{self.layers}I", *sums)
        head += struct.pack("<I", zlib.crc32(head))
        self._write_at(memoryview(bytes(_PAGE)), base)
        for place, layer in enumerate(layers):
            self._write_at(layer, base + self._header_bytes + place * self.layer_bytes)
        self._write_at(memoryview(head.ljust(self._header_bytes, b"\0")), base)

    def checksums(self, block: int, key: bytes) -> tuple[int, ...] | None:
        """Of the layers of this chunk; None if the block does not hold it, or cannot be read."""
        try:
            told = self._told(self._header_of(block))
        except OSError as error:
            log.error("The file of cache.disk cannot be read: %s", error)
            return None
        return told[2] if told is not None and told[0] == key else None

    def read_layer(self, block: int, layer: int, into: memoryview, checksum: int) -> bool:
        """False: what is there is something else, or cannot be read."""
        place = block * self._stride + self._header_bytes + layer * self.layer_bytes
        try:
            return os.preadv(self._file, [into], place) == self.layer_bytes and zlib.crc32(into) == checksum
        except OSError as error:
            log.error("The file of cache.disk cannot be read: %s", error)
            return False

    def measure_s(self) -> float:
        """Seconds to read a chunk as it is read later, checksums and all, from the disk and not from the system's cache: the
        median over chunks that were written for it to the first blocks that hold nothing."""
        used = set(self.kept.values())
        free = [block for block in range(self.blocks) if block not in used][:8] or [0]
        layers = [memoryview(os.urandom(self.layer_bytes)) for _ in range(self.layers)]
        into, key = memoryview(bytearray(self.layer_bytes)), bytes(16)
        for block in free:
            self.write(block, key, layers)
            self.kept = {name: place for name, place in self.kept.items() if place != block}
        os.fsync(self._file)
        taken: list[float] = []
        while not taken or (sum(taken) < _PROBE_S and len(taken) < 8 * len(free)):
            block = free[len(taken) % len(free)]
            os.posix_fadvise(self._file, block * self._stride, self._stride, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            sums = self.checksums(block, key)
            assert sums is not None
            for layer in range(self.layers):
                self.read_layer(block, layer, into, sums[layer])
            taken.append(time.perf_counter() - began)
        for block in free:
            self._write_at(memoryview(bytes(_PAGE)), block * self._stride)
        return sorted(taken)[len(taken) // 2]

    def close(self) -> None:
        os.close(self._file)

    def _header_of(self, block: int) -> bytes:
        return os.pread(self._file, self._header_bytes, block * self._stride)

    def _told(self, header: bytes) -> tuple[bytes, int, tuple[int, ...]] | None:
        """Key, number of the write and checksums of a chunk; None where it is none of this store's, or damaged."""
        if len(header) < self._header_bytes:
            return None
        magic, identity, key, number, *layout = _HEADER.unpack_from(header)
        if (magic, identity, layout) != (_MAGIC, self._identity, [self.layers, self.layer_bytes]):
            return None
        end = _HEADER.size + 4 * self.layers
        if struct.unpack_from("<I", header, end) != (zlib.crc32(header[:end]),):
            return None
        return key, number, struct.unpack_from(f"<{self.layers}I", header, _HEADER.size)

    def _write_at(self, data: memoryview, place: int) -> None:
        while data:
            written = os.pwrite(self._file, data, place)
            data, place = data[written:], place + written


def _padded(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
