"""Reader of GGUF files (versions 2 and 3): metadata and tensor table, every number checked before it is used.

Format: ggml's docs/gguf.md. Nothing is allocated before the count or length that asks for it was compared, as a
Python integer, with the bytes left in the file. The file is read with `pread`, not mapped: a file that another
process truncates gives an error here, where a mapping would kill the process.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from labkit.errors import FileFormatError
from labkit.text import plain

MAX_HEADER_BYTES = 64 * 2**20
MAX_METADATA_ENTRIES = 65_536
MAX_TENSORS = 262_144
MAX_STRINGS = 2**21
MAX_KEY_BYTES = 65_535
MAX_STRING_BYTES = 4 * 2**20
MAX_TENSOR_NAME_BYTES = 1024
MAX_DIMS = 4
MAX_ALIGNMENT = 2**20
DEFAULT_ALIGNMENT = 32
_CHUNK_BYTES = 4 * 2**20

# Block length in elements and block size in bytes, by the type's number and name (ggml.h, gguf constants.py).
_KINDS: Mapping[int, tuple[str, int, int]] = MappingProxyType(
    {
        0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
        16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
        20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
        24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
        29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
        39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
    }
)  # fmt: skip
_NUMBERS: Mapping[int, str] = MappingProxyType(
    {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|u1", 10: "<u8", 11: "<i8", 12: "<f8"}
)
_BOOL, _STRING, _ARRAY, _UINT32 = 7, 8, 9, 4


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the table.

    Attributes:
        name: as in the file; text from outside.
        shape: rows first, as torch has it: the reverse of the order in the file.
        kind: ggml's type name, such as "Q4_1".
        offset: first byte, counted from the start of the file.
        num_bytes: size in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """A checked header.

    Attributes:
        metadata: values by key: int, float, bool, str, tuple of str, or a read-only numpy array for numbers.
        tensors: by name, in the order of the file.
        path: the file.
        version, alignment, data_offset, num_bytes: of the header; bytes.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    path: Path
    version: int
    alignment: int
    data_offset: int
    num_bytes: int

    def read(self, name: str) -> np.ndarray:
        """The stored bytes of tensor `name`: uint8 `[num_bytes]`.

        Raises:
            FileFormatError: no such tensor, or the file is shorter than when its header was read.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise FileFormatError(f"{_shown(self.path)}: no tensor {plain(name, 80)!r}")
        try:
            with open(self.path, "rb", buffering=0) as file:
                data = np.empty(tensor.num_bytes, dtype=np.uint8)
                file.seek(tensor.offset)
                view, filled = data.data, 0
                while filled < tensor.num_bytes:
                    got = file.readinto(view[filled:])
                    if not got:
                        break
                    filled += got
        except OSError as error:
            raise FileFormatError(f"cannot read {_shown(self.path)}: {error.strerror or error}") from error
        if filled < tensor.num_bytes:
            raise FileFormatError(
                f"{_shown(self.path)}: tensor {plain(name, 80)!r} ends early; the file changed after it was opened",
                needed=f"{tensor.num_bytes} bytes",
                available=f"{filled} bytes",
            )
        return data


def read_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Read metadata and tensor table of a GGUF file (little-endian, version 2 or 3).

    Raises:
        FileFormatError: missing, truncated, inconsistent, over a limit of this module, or another format; the
            message names the field, its value and the bytes left.
    """
    path = Path(path)
    try:
        if not path.is_file():
            raise FileFormatError(f"{_shown(path)} is not a file", works="the path of a .gguf file")
        with open(path, "rb", buffering=0) as file:
            return _read(_Cursor(file.fileno(), path))
    except (OSError, ValueError) as error:
        if isinstance(error, FileFormatError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise FileFormatError(f"cannot read {_shown(path)}: {plain(reason, 200)}") from error


def _read(cursor: _Cursor) -> GgufFile:
    version, num_tensors, num_entries = _read_start(cursor)
    metadata: dict[str, Any] = {}
    for index in range(num_entries):
        key = cursor.string(f"key {index}", MAX_KEY_BYTES)
        if not key:
            raise cursor.error(f"key {index}", "''", "at least one character")
        if key in metadata:
            raise cursor.error(f"key {index}", repr(plain(key, 80)), "no key twice")
        metadata[key] = _read_value(cursor, key)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        allowed = f"a power of two up to {MAX_ALIGNMENT}"
        raise cursor.error("general.alignment", plain(repr(alignment), 60), allowed)
    entries = [_read_tensor(cursor, index) for index in range(num_tensors)]
    data_offset = -(-cursor.position // alignment) * alignment
    tensors = _place(cursor, entries, data_offset, alignment)
    return GgufFile(
        metadata=MappingProxyType(metadata), tensors=MappingProxyType(tensors), path=cursor.path, version=version,
        alignment=alignment, data_offset=data_offset, num_bytes=cursor.size,
    )  # fmt: skip


def _read_start(cursor: _Cursor) -> tuple[int, int, int]:
    magic = cursor.take(4, "magic")
    if magic != b"GGUF":
        raise cursor.error("magic", repr(bytes(magic)), "b'GGUF'")
    version = cursor.integer("<I", "version")
    if version not in (2, 3):
        big_endian = " (a big-endian file)" if version in (2 << 24, 3 << 24) else ""
        raise cursor.error("version", f"{version}{big_endian}", "2 or 3, little-endian")
    num_tensors = cursor.integer("<Q", "tensor count")
    num_entries = cursor.integer("<Q", "metadata count")
    # The smallest tensor entry takes 8 + 0 + 4 + 8 + 4 + 8 bytes, the smallest metadata entry 8 + 1 + 4 + 1.
    cursor.check_count(num_tensors, 32, MAX_TENSORS, "tensor count")
    cursor.check_count(num_entries, 14, MAX_METADATA_ENTRIES, "metadata count")
    return version, num_tensors, num_entries


def _read_value(cursor: _Cursor, key: str) -> Any:
    kind = cursor.integer("<I", f"type of {key}")
    if kind == _STRING:
        return cursor.string(key, MAX_STRING_BYTES)
    if kind == _ARRAY:
        return _read_array(cursor, key)
    if kind not in _NUMBERS:
        raise cursor.error(f"type of {key}", str(kind), "0 to 12")
    value = cursor.numbers(_NUMBERS[kind], 1, key)[0].item()
    if kind != _BOOL:
        return value
    if value > 1:
        raise cursor.error(key, str(value), "0 or 1 for a bool")
    return bool(value)


def _read_array(cursor: _Cursor, key: str) -> Any:
    kind = cursor.integer("<I", f"element type of {key}")
    count = cursor.integer("<Q", f"length of {key}")
    if kind == _STRING:
        cursor.check_count(count, 8, MAX_STRINGS, f"length of {key}")
        return cursor.strings(count, key)
    if kind not in _NUMBERS:
        raise cursor.error(f"element type of {key}", str(kind), "a number, bool or string")
    values = cursor.numbers(_NUMBERS[kind], count, key)
    if kind != _BOOL:
        return values
    if count and values.max() > 1:
        raise cursor.error(key, str(values.max()), "0 or 1 for a bool")
    return values.view(bool)


def _read_tensor(cursor: _Cursor, index: int) -> tuple[str, tuple[int, ...], str, int, int]:
    name = cursor.string(f"name of tensor {index}", MAX_TENSOR_NAME_BYTES)
    if not name:
        raise cursor.error(f"name of tensor {index}", "''", "at least one character")
    shown = f"tensor {plain(name, 80)!r}"
    num_dims = cursor.integer("<I", f"dimensions of {shown}")
    if not 0 <= num_dims <= MAX_DIMS:
        raise cursor.error(f"dimensions of {shown}", str(num_dims), f"0 to {MAX_DIMS}")
    dims = tuple(cursor.integer("<Q", f"dimension {axis} of {shown}") for axis in range(num_dims))
    for axis, length in enumerate(dims):
        if not 1 <= length < 2**63:
            raise cursor.error(f"dimension {axis} of {shown}", str(length), "1 or more")
    number = cursor.integer("<I", f"type of {shown}")
    if number not in _KINDS:
        raise cursor.error(f"type of {shown}", str(number), "a type of ggml that this version knows")
    kind, block_length, block_bytes = _KINDS[number]
    row_length = dims[0] if dims else 1
    if row_length % block_length:
        raise cursor.error(f"dimension 0 of {shown}", str(row_length), f"a multiple of {block_length} for {kind}")
    num_bytes = math.prod(dims) // block_length * block_bytes
    return name, tuple(reversed(dims)), kind, cursor.integer("<Q", f"offset of {shown}"), num_bytes


def _place(
    cursor: _Cursor, entries: list[tuple[str, tuple[int, ...], str, int, int]], data_offset: int, alignment: int
) -> dict[str, GgufTensor]:
    """The tensors with offsets in the file; each lies inside the file and none overlaps another."""
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset, num_bytes in entries:
        shown = f"tensor {plain(name, 80)!r}"
        if name in tensors:
            raise cursor.error("tensor name", repr(plain(name, 80)), "no name twice")
        if offset % alignment:
            raise cursor.error(f"offset of {shown}", str(offset), f"a multiple of the alignment {alignment}")
        left = cursor.size - data_offset - offset
        if num_bytes > left:
            allowed = f"at most the {max(left, 0)} bytes from there to the end"
            raise cursor.error(f"size of {shown} at offset {offset}", f"{num_bytes} bytes", allowed)
        tensors[name] = GgufTensor(name, shape, kind, data_offset + offset, num_bytes)
    end, before = 0, ""
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            names = f"{plain(before, 80)!r} and {plain(tensor.name, 80)!r}"
            raise cursor.error(f"offset of tensors {names}", str(tensor.offset), "no overlap")
        end, before = tensor.offset + tensor.num_bytes, tensor.name
    return tensors


def _shown(path: Path) -> str:
    return plain(path, 200)


class _Cursor:
    """Reads the header front to back; `size` is the file's, `position` the next byte."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self.path = path
        self.size = os.fstat(descriptor).st_size
        self.position = 0
        self._descriptor = descriptor
        self._buffer = bytearray()
        self._num_strings = 0

    def error(self, field: str, value: str, allowed: str) -> FileFormatError:
        left = max(self.size - self.position, 0)
        found = f"{_shown(self.path)}: {plain(field, 160)} is {plain(value, 160)}"
        return FileFormatError(
            f"{found}, allowed is {allowed} ({left} bytes left)", works="getting the whole file again"
        )

    def check_count(self, count: int, smallest_bytes: int, limit: int, field: str) -> None:
        left = self.size - self.position
        if count > limit:
            raise self.error(field, str(count), f"at most {limit}")
        if count * smallest_bytes > left:
            raise self.error(field, str(count), f"at most {left // smallest_bytes}, as many as the file can hold")

    def need(self, num_bytes: int, field: str) -> None:
        """Have the next `num_bytes` in the buffer, or raise before anything is allocated."""
        end = self.position + num_bytes
        if end > self.size:
            raise self.error(f"size of {field}", f"{num_bytes} bytes", f"{self.size - self.position} bytes left")
        if end > MAX_HEADER_BYTES:
            raise self.error(f"end of {field}", f"{end} bytes", f"a header of at most {MAX_HEADER_BYTES} bytes")
        while len(self._buffer) < end:
            wanted = min(max(end - len(self._buffer), _CHUNK_BYTES), self.size - len(self._buffer))
            chunk = os.pread(self._descriptor, wanted, len(self._buffer))
            if not chunk:
                raise self.error(f"size of {field}", f"{num_bytes} bytes", "less: the file became shorter while read")
            self._buffer += chunk

    def take(self, num_bytes: int, field: str) -> bytes:
        self.need(num_bytes, field)
        start, self.position = self.position, self.position + num_bytes
        return bytes(self._buffer[start : self.position])

    def integer(self, layout: str, field: str) -> int:
        return struct.unpack(layout, self.take(struct.calcsize(layout), field))[0]

    def numbers(self, dtype: str, count: int, field: str) -> np.ndarray:
        values = np.frombuffer(self.take(count * np.dtype(dtype).itemsize, field), dtype=dtype)
        return values.astype(values.dtype.newbyteorder("="), copy=False)

    def string(self, field: str, limit: int) -> str:
        length = self.integer("<Q", f"length of {field}")
        if length > limit:
            raise self.error(f"length of {field}", str(length), f"at most {limit}")
        return self._decode(self.take(length, field), field)

    def strings(self, count: int, field: str) -> tuple[str, ...]:
        self._num_strings += count
        if self._num_strings > MAX_STRINGS:
            raise self.error(f"length of {field}", str(count), f"at most {MAX_STRINGS} strings in all arrays together")
        return tuple([self.string(field, MAX_STRING_BYTES) for _ in range(count)])

    def _decode(self, data: bytes, field: str) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self.error(f"byte {error.start} of {field}", f"0x{data[error.start]:02x}", "UTF-8 text") from error
