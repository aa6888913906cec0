"""Fingerprints of weight files: which model it is, by its bytes, without reading all of them.

Names, types and places of tensors are the same in a model and its fine-tunes, so samples of each tensor's bytes count
as well. That tells models apart that were trained, not files in which a few bytes are damaged.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from stretto.errors import ModelLoadError

SAMPLES = 4
"""Of each tensor, evenly spread from its first bytes to its last."""
SAMPLE_BYTES = 256
LONGEST_HEADER = 64 << 20


def fingerprint_safetensors(file: Path) -> str:
    """16 hex digits for the header and the tensors' samples. Blocks on the disk. Raises ModelLoadError."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = stream.read(min(length, LONGEST_HEADER))
        try:
            entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
            spans = [tuple(map(int, entry["data_offsets"])) for _, entry in sorted(entries.items())]
            places = [(8 + length + start, end - start) for start, end in spans]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ModelLoadError(f"{file}: not a readable safetensors file: {error}") from error
        return _digest(header, stream.fileno(), places)


def fingerprint_gguf(file: Path) -> str:
    """16 hex digits for samples of the whole file, its beginning in full. Blocks on the disk."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(1 << 20)
        piece = max(_GGUF_PIECE, size // _GGUF_PIECES)
        starts = range(len(head), size, piece)
        return _digest(head, stream.fileno(), [(start, min(piece, size - start)) for start in starts])


_GGUF_PIECE, _GGUF_PIECES = 1 << 20, 1024
"""Smallest size and largest number of pieces, of which samples are taken as of tensors elsewhere."""


def _digest(header: bytes, descriptor: int, places: Iterable[tuple[int, int]]) -> str:
    digest = hashlib.sha256(header)
    for start, length in places:
        last = max(0, length - SAMPLE_BYTES)
        for offset in sorted({last * number // (SAMPLES - 1) for number in range(SAMPLES)}):
            digest.update(os.pread(descriptor, min(SAMPLE_BYTES, length - offset), start + offset))
    return digest.hexdigest()[:16]
