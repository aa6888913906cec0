"""The GGUF container: reads metadata and the tensor directory of a file through a memory map.

Owns the byte layout and its checks. Knows nothing of what a key or a tensor means (gguf.py) nor of how
quantised blocks are laid out inside a tensor (gguf_quants.py).
"""

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from stretto.errors import ModelLoadError

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32

# ggml type id -> (name, elements of one block, bytes of one block). The ids of all types that ggml has defined,
# so that a type that cannot be dequantised is still named in the error.
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}

_STRING, _ARRAY = 8, 9
# Metadata value type id -> struct format of one little-endian scalar.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_ARRAY_DTYPES = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One entry of the tensor directory; `data` is a view into the file, valid as long as anything refers to it."""

    name: str
    shape: tuple[int, ...]
    """In torch order: (rows, columns) for a matrix. Rows are contiguous."""
    type_name: str
    """The ggml type, as ggml spells it: "F32", "Q4_1", ..."""
    data: npt.NDArray[np.uint8]
    """Raw bytes, one-dimensional."""
    file: Path

    def rows(self, wanted: range) -> "GGUFTensor":
        """Some of its rows (of a vector: elements, whole blocks of them), as a view."""
        row_bytes = self.data.size // self.shape[0]
        data = self.data[wanted.start * row_bytes : wanted.stop * row_bytes]
        return replace(self, shape=(len(wanted), *self.shape[1:]), data=data)

    def columns(self, wanted: range) -> tuple["GGUFTensor", int]:
        """The whole blocks of a matrix that hold some of its columns, copied, and the column they begin with."""
        _, block, block_bytes = next(kind for kind in GGML_TYPES.values() if kind[0] == self.type_name)
        first, last = wanted.start // block, -(-wanted.stop // block)
        blocks = self.data.reshape(self.shape[0], self.shape[1] // block, block_bytes)[:, first:last]
        shape = (self.shape[0], (last - first) * block)
        return replace(self, shape=shape, data=np.ascontiguousarray(blocks).reshape(-1)), first * block


class GGUFFile:
    """A GGUF file: `metadata` by key, `tensors` by name. Both complete after construction; tensor bytes are read
    lazily.

    Raises ModelLoadError if the file cannot be opened, is not a GGUF file of a supported version, is truncated, or has
    a count, length, type or offset that does not fit it. No count from the file is trusted before it was compared with
    the bytes that are left. Blocks on disk reads.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as stream:
                head = stream.read(4)
                if head != MAGIC:
                    raise ModelLoadError(f"{self.path}: not a GGUF file (it starts with {head!r}, not {MAGIC!r})")
                # Valid after the descriptor is closed, as long as a view of it lives. Private (copy on write), since
                # torch refuses read-only memory; nothing writes to it.
                mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise ModelLoadError(f"{self.path}: cannot be read: {error.strerror or error}") from error
        cursor = _Cursor(mapped, self.path)
        self.metadata: dict[str, object] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        tensor_count, metadata_count = self._read_header(cursor)
        self._read_metadata(cursor, metadata_count)
        self._read_tensors(cursor, tensor_count, mapped)

    def _read_header(self, cursor: "_Cursor") -> tuple[int, int]:
        cursor.position = len(MAGIC)
        self.version = cursor.scalar("I")
        if self.version not in SUPPORTED_VERSIONS:
            swapped = int.from_bytes(self.version.to_bytes(4, "little"), "big")
            if swapped in SUPPORTED_VERSIONS:
                raise ModelLoadError(f"{self.path}: a big-endian GGUF file; only little-endian files are supported")
            supported = " and ".join(map(str, SUPPORTED_VERSIONS))
            raise ModelLoadError(f"{self.path}: GGUF version {self.version}; versions {supported} are supported")
        tensor_count = cursor.count("Q", smallest=24, what="tensor count")
        metadata_count = cursor.count("Q", smallest=13, what="metadata count")
        return tensor_count, metadata_count

    def _read_metadata(self, cursor: "_Cursor", count: int) -> None:
        for _ in range(count):
            key = cursor.string("a metadata key")
            if key in self.metadata:
                cursor.fail(f"metadata key {key!r} occurs twice")
            self.metadata[key] = cursor.value(cursor.scalar("I"), key)

    def _read_tensors(self, cursor: "_Cursor", count: int, mapped: mmap.mmap) -> None:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            cursor.fail(f"general.alignment is {alignment!r}; a power of two of at least 8 is expected")
        entries = [self._read_tensor_entry(cursor, alignment) for _ in range(count)]
        base = -(-cursor.position // alignment) * alignment
        contents = np.frombuffer(mapped, dtype=np.uint8)
        for name, shape, type_name, size, offset in entries:
            if name in self.tensors:
                cursor.fail(f"tensor {name!r} occurs twice")
            begin = base + offset
            if begin + size > contents.size:
                raise ModelLoadError(
                    f"{self.path}: tensor {name!r} ({type_name}, shape {shape}) needs bytes {begin} to {begin + size}, "
                    f"but the file has {contents.size}: it is truncated or damaged; fetch it again"
                )
            self.tensors[name] = GGUFTensor(name, shape, type_name, contents[begin : begin + size], self.path)

    def _read_tensor_entry(self, cursor: "_Cursor", alignment: int) -> tuple[str, tuple[int, ...], str, int, int]:
        name = cursor.string("a tensor name")
        dimensions = cursor.scalar("I")
        if dimensions > MAX_DIMENSIONS:
            cursor.fail(f"tensor {name!r} has {dimensions} dimensions; at most {MAX_DIMENSIONS} are possible")
        # The file lists the fastest-varying dimension first, torch lists it last.
        shape = tuple(cursor.scalar("Q") for _ in range(dimensions))[::-1]
        type_id, offset = cursor.scalar("I"), cursor.scalar("Q")
        if type_id not in GGML_TYPES:
            cursor.fail(f"tensor {name!r} has the unknown ggml type {type_id}")
        type_name, block, block_bytes = GGML_TYPES[type_id]
        columns = shape[-1] if shape else 1
        if columns % block or 0 in shape:
            cursor.fail(f"tensor {name!r} of shape {shape} cannot hold {type_name}: rows come in blocks of {block}")
        if offset % alignment:
            cursor.fail(f"tensor {name!r} starts at offset {offset}, which is no multiple of {alignment}")
        return name, shape, type_name, math.prod(shape) // block * block_bytes, offset


class _Cursor:
    """Reads values one after the other and refuses to read past the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.size = len(data)
        self.path = path
        self.position = 0

    def fail(self, problem: str) -> NoReturn:
        raise ModelLoadError(f"{self.path}: {problem} (at byte {self.position} of {self.size})")

    def need(self, size: int, what: str) -> None:
        if size > self.size - self.position:
            self.fail(f"truncated or damaged: {what} needs {size} bytes and {self.size - self.position} are left")

    def scalar(self, code: str) -> int:
        size = struct.calcsize("<" + code)
        self.need(size, "a value")
        (value,) = struct.unpack_from("<" + code, self.data, self.position)
        self.position += size
        return value  # type: ignore[no-any-return]  # struct knows no types

    def count(self, code: str, *, smallest: int, what: str) -> int:
        """A number of items of at least `smallest` bytes each; refused if so many cannot follow."""
        value = self.scalar(code)
        self.need(value * smallest, f"{what} {value}")
        return value

    def string(self, what: str) -> str:
        length = self.count("Q", smallest=1, what=f"length of {what}")
        raw = self.data[self.position : self.position + length]
        self.position += length
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8: {error}")

    def value(self, type_id: int, key: str) -> object:
        if type_id == _STRING:
            return self.string(f"{key!r}")
        if type_id == _ARRAY:
            return self._array(key)
        if type_id not in _SCALARS:
            self.fail(f"metadata key {key!r} has the unknown value type {type_id}")
        return self.scalar(_SCALARS[type_id])

    def _array(self, key: str) -> list[object]:
        type_id = self.scalar("I")
        if type_id == _STRING:
            return list(self._strings(self.count("Q", smallest=8, what=f"length of {key!r}"), key))
        if type_id not in _ARRAY_DTYPES:  # arrays of arrays included: nothing writes them
            self.fail(f"metadata key {key!r} is an array of the unsupported value type {type_id}")
        dtype = np.dtype(_ARRAY_DTYPES[type_id])
        length = self.count("Q", smallest=dtype.itemsize, what=f"length of {key!r}")
        values = np.frombuffer(self.data, dtype, length, self.position)
        self.position += values.nbytes
        return values.tolist()  # type: ignore[no-any-return]  # list of Python scalars

    def _strings(self, count: int, key: str) -> list[str]:
        # The token and merge lists have 10^5 strings: this loop is most of the time of opening a file, so it works on
        # locals, and checks lengths by the one comparison that catches an overrun.
        data, size, position = self.data, self.size, self.position
        unpack: Callable[[mmap.mmap, int], tuple[int]] = struct.Struct("<Q").unpack_from
        strings: list[str] = []
        try:
            for _ in range(count):
                (length,) = unpack(data, position)
                begin = position + 8
                position = begin + length
                if position > size:
                    break
                strings.append(data[begin:position].decode())
        except UnicodeDecodeError as error:
            self.fail(f"string {len(strings)} of {key!r} is not UTF-8: {error}")
        except struct.error:
            position = size + 1
        if len(strings) < count:
            self.fail(f"truncated or damaged: string {len(strings)} of the {count} of {key!r} ends past the file")
        self.position = position
        return strings
