"""Whether a GGUF file is what its own header says, before a reader makes anything of it."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from pensieve.errors import WeightsMissing

_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a number, by its type
_INTEGERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 10: "<Q", 11: "<q"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_MOST_DIMENSIONS = 4  # ggml's


class _Damaged(ValueError):
    """Its text ends the sentence."""


class _Header:
    """Reads one value after the other, and never beyond the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def skip(self, size: int) -> int:
        """Returns where the skipped bytes begin."""
        if size > len(self.data) - self.at:
            raise _Damaged("its header goes on beyond its end")
        self.at += size
        return self.at - size

    def number(self, form: str) -> int:
        return int(struct.unpack_from(form, self.data, self.skip(struct.calcsize(form)))[0])

    def text(self) -> bytes:
        size = self.number("<Q")
        start = self.skip(size)
        return self.data[start : start + size]

    def value(self) -> int | bytes | None:
        """An integer or a string; None for what nobody here asks for."""
        kind = self.number("<I")
        if kind == _STRING:
            return self.text()
        if kind in _INTEGERS:
            return self.number(_INTEGERS[kind])
        if kind in _WIDTHS:
            self.skip(_WIDTHS[kind])
        elif kind == _ARRAY:
            self._array()
        else:
            raise _Damaged(f"its header holds a value of the unknown type {kind}")
        return None

    def _array(self) -> None:
        kind, count = self.number("<I"), self.number("<Q")
        if kind in _WIDTHS:
            self.skip(count * _WIDTHS[kind])
        elif kind == _STRING:
            for _ in range(count):
                self.skip(self.number("<Q"))
        else:
            raise _Damaged(f"its header holds an array of the unknown type {kind}")


def check_gguf_header(file: Path) -> None:
    """Walk the header once. Readers trust its counts, lengths and offsets, for minutes and gigabytes where one is wrong.

    Raises WeightsMissing where the header, a tensor or a block that it tells of is not in the file. Needs the package gguf.
    """
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _check(_Header(data))
    except (ValueError, OSError) as error:  # an empty file cannot be mapped
        raise WeightsMissing(f"{file} is not a whole GGUF file: {error}; fetch it again.") from error


def _check(header: _Header) -> None:
    if header.data[:4] != b"GGUF":
        raise _Damaged("it does not begin with GGUF")
    header.skip(4)
    version = header.number("<I")
    if version not in _VERSIONS:
        raise _Damaged(f"its version is {version}, and {' and '.join(map(str, _VERSIONS))} can be read")
    tensors, entries = header.number("<Q"), header.number("<Q")
    fields: dict[bytes, int | bytes | None] = {}
    for _ in range(entries):
        key = header.text()
        if key in fields:
            raise _Damaged(f"its header says {key!r} twice")
        fields[key] = header.value()
    sizes = _tensors(header, tensors)
    alignment = fields.get(b"general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise _Damaged(f"its general.alignment is {alignment!r}")
    begin = -(-header.at // alignment) * alignment
    for name, (offset, size) in sizes.items():
        if begin + offset + size > len(header.data):
            raise _Damaged(f"the tensor {name!r} ends beyond its end")
    architecture = fields.get(b"general.architecture")
    said = fields.get(architecture + b".block_count") if isinstance(architecture, bytes) else None
    held = len({name.split(b".")[1] for name in sizes if name.startswith(b"blk.")})
    if not isinstance(said, int) or not 0 < said <= held:
        raise _Damaged(f"its header says block_count={said!r}, and it holds {held} blocks")


def _tensors(header: _Header, count: int) -> dict[bytes, tuple[int, int]]:
    """Offset and bytes of each tensor, by name."""
    from gguf import GGML_QUANT_SIZES

    by_type = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
    found: dict[bytes, tuple[int, int]] = {}
    for _ in range(count):
        name, dimensions = header.text(), header.number("<I")
        if name in found:
            raise _Damaged(f"it has the tensor {name!r} twice")
        if dimensions > _MOST_DIMENSIONS:
            raise _Damaged(f"its tensor {name!r} has {dimensions} dimensions")
        elements = 1
        for _ in range(dimensions):
            elements *= header.number("<Q")
        kind, offset = header.number("<I"), header.number("<Q")
        if kind not in by_type:
            raise _Damaged(f"its tensor {name!r} has the unknown type {kind}")
        block, size = by_type[kind]
        if elements % block:
            raise _Damaged(f"its tensor {name!r} has {elements} elements, in blocks of {block}")
        found[name] = offset, elements // block * size
    return found
