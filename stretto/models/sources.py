"""Where weights come from: safetensors checkpoints, GGUF files, or random numbers, behind one small interface.

Owns files, names and shapes as stored, and reads no more of a tensor than the part that is asked for. How tensors
become parameters is weights.py's.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stretto.errors import ModelLoadError
from stretto.models.gguf import GGUFFile, GGUFTensor, dequantize, hf_name

INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class TensorPart:
    """The indices of a tensor along one dimension that are to be read; a step of 1."""

    dim: int
    """0 (rows, or the elements of a vector) or 1 (columns)."""
    indices: range


class WeightSource(Protocol):
    """Tensors by the names that HF checkpoints give them. Reading blocks on the disk."""

    origin: str
    """What to call the source in an error: a path."""
    rows_in_pairs: bool
    """True if the rows of q and k heads are stored in pair order (rope.py) rather than HF's halves."""
    total_elements: int
    """Elements of all tensors, for progress."""

    @property
    def names(self) -> Collection[str]:
        """Every tensor that is there; empty if the source makes up whatever it is asked for."""

    def read(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor:
        """A tensor of `shape`, or a part of it: any floating dtype, perhaps a view of the file: to be copied, never
        kept or written to.

        Raises ModelLoadError if it is missing, has another shape, or cannot be read.
        """


class SafetensorsSource:
    """A directory of safetensors files, memory-mapped: one file, or shards with or without an index.

    Construction raises ModelLoadError naming the file if there is none, a shard is missing, or one is damaged.
    """

    rows_in_pairs = False

    def __init__(self, directory: Path) -> None:
        self.origin = str(directory)
        index_path = directory / INDEX_NAME
        placed = _read_index(index_path) if index_path.is_file() else None
        file_names = _unindexed_files(directory) if placed is None else sorted(set(placed.values()))
        self._file_of: dict[str, Any] = {}
        self.total_elements = 0
        for file_name in file_names:
            path = directory / file_name
            if not path.is_file():
                raise ModelLoadError(f"{path}: this shard is named in {INDEX_NAME} but missing; fetch the model again")
            file = _open_safetensors(path)
            for name in file.keys():  # noqa: SIM118  # not a mapping
                if placed is not None and placed.get(name) != file_name:
                    continue  # the index decides
                self._file_of[name] = file
                size = 1
                for extent in file.get_slice(name).get_shape():
                    size *= extent
                self.total_elements += size
        if placed is not None and (absent := sorted(set(placed) - set(self._file_of))):
            path = directory / placed[absent[0]]
            raise ModelLoadError(f"{path}: tensor {absent[0]!r} is not in this file, where {INDEX_NAME} says it is")

    @property
    def names(self) -> Collection[str]:
        return self._file_of.keys()

    def read(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor:
        file = self._file_of.get(name)
        if file is None:
            _fail_missing(self.origin, name)
        stored = file.get_slice(name)
        found = tuple(stored.get_shape())
        if found != shape:
            _fail_shape(self.origin, name, found, shape)
        tensor: Tensor
        if part is None:
            tensor = file.get_tensor(name)
        else:
            wanted = slice(part.indices.start, part.indices.stop)
            tensor = stored[wanted] if part.dim == 0 else stored[:, wanted]
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise ModelLoadError(
                f"{self.origin}: tensor {name!r} has dtype {tensor.dtype}; supported: float32, float16, bfloat16"
            )
        return tensor


class GGUFSource:
    """The weights of an open GGUF file, dequantised as they are read."""

    def __init__(self, gguf: GGUFFile) -> None:
        self.origin = str(gguf.path)
        # llama.cpp's converter reorders q and k for this architecture only.
        self.rows_in_pairs = gguf.metadata.get("general.architecture") == "llama"
        self._tensors: dict[str, GGUFTensor] = {}
        self.total_elements = 0
        for tensor in gguf.tensors.values():
            try:
                name = hf_name(tensor.name)
            except KeyError:
                name = tensor.name  # reported as unexpected under its own name
            if name is not None:
                self._tensors[name] = tensor
                self.total_elements += torch.Size(tensor.shape).numel()

    @property
    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def read(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            _fail_missing(self.origin, name)
        if tensor.shape != shape:
            _fail_shape(self.origin, f"{name} ({tensor.name})", tensor.shape, shape)
        if part is None:
            return dequantize(tensor)
        if part.dim == 0:
            return dequantize(tensor.rows(part.indices))
        blocks, first_column = tensor.columns(part.indices)
        begin = part.indices.start - first_column
        return dequantize(blocks)[:, begin : begin + len(part.indices)]


class RandomSource:
    """Makes up every tensor it is asked for: norms near one, the rest normal with deviation 0.02. For benchmarks.

    One block of random numbers, the same for a seed on every device, is laid end to end over each tensor from a start
    that depends on its name: as fast as memory, where fresh numbers for 8 billion weights would take a minute. The
    block's length is prime, so that rows differ and logits do not tie.
    """

    rows_in_pairs = True
    names: Collection[str] = ()
    _BLOCK = 4_194_301

    def __init__(self, seed: int, device: torch.device, total_elements: int) -> None:
        self.origin = f"dummy weights (seed {seed})"
        self.total_elements = total_elements
        generator = torch.Generator().manual_seed(seed)
        block = torch.empty(self._BLOCK).normal_(std=0.02, generator=generator)
        self._block = block.to(device)

    def read(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor:
        columns = torch.Size(shape[1:]).numel()
        if part is not None and part.dim == 1:
            out = torch.empty(shape[0], len(part.indices), dtype=self._block.dtype, device=self._block.device)
            # Whole rows, as many as the block is long at a time: a part must be what the whole tensor has there.
            step = max(1, self._BLOCK // columns)
            for row in range(0, shape[0], step):
                rows = min(step, shape[0] - row)
                whole = self._elements(name, row * columns, rows * columns).view(rows, columns)
                out[row : row + rows] = whole[:, part.indices.start : part.indices.stop]
        else:
            rows_read = range(shape[0]) if part is None else part.indices
            flat = self._elements(name, rows_read.start * columns, len(rows_read) * columns)
            out = flat.view(len(rows_read), *shape[1:])
        return out.add_(1.0) if name.endswith("norm.weight") else out

    def _elements(self, name: str, first: int, count: int) -> Tensor:
        """`count` elements of a tensor from its element `first` on, as a vector."""
        flat = torch.empty(count, dtype=self._block.dtype, device=self._block.device)
        start = (zlib.crc32(name.encode()) + first) % self._BLOCK
        filled = 0
        while filled < count:
            piece = self._block[start : start + count - filled]
            flat[filled : filled + piece.numel()] = piece
            filled += piece.numel()
            start = 0
        return flat


def _read_index(path: Path) -> Mapping[str, str]:
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"{path}: not a readable index of safetensors shards: {error!r}") from error
    if not isinstance(weight_map, dict) or not all(isinstance(file_name, str) for file_name in weight_map.values()):
        raise ModelLoadError(f"{path}: weight_map does not map tensor names to file names")
    if outside := [file_name for file_name in weight_map.values() if Path(file_name).name != file_name]:
        raise ModelLoadError(f"{path}: {outside[0]!r} is not the name of a file beside the index")
    return weight_map


def _unindexed_files(directory: Path) -> list[str]:
    if (directory / "model.safetensors").is_file():
        return ["model.safetensors"]
    found = sorted(path.name for path in directory.glob("*.safetensors"))
    if not found:
        others = sorted(path.name for path in directory.glob("*.bin"))
        hint = f" ({others[0]} is of a format that is not read: convert it to safetensors)" if others else ""
        raise ModelLoadError(f"{directory}: no .safetensors file{hint}")
    return found


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: truncated or not a safetensors file: {error}") from error


def _fail_missing(origin: str, name: str) -> NoReturn:
    raise ModelLoadError(f"{origin}: tensor {name!r} is missing")


def _fail_shape(origin: str, name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> NoReturn:
    raise ModelLoadError(f"{origin}: tensor {name!r} has shape {list(found)}; the config asks for {list(shape)}")
