"""A guard against hidden syncs: raises where code looks at a tensor's value on the host.

On a CPU such a look costs nothing and would go unnoticed; on a GPU it waits for everything enqueued so far. So the
tests forbid it everywhere. The guard holds for the calling thread only (torch keeps its modes per thread): work that a
device's worker thread runs must enter it there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_READING_CALLS = frozenset(
    {
        "item",
        "tolist",
        "numpy",
        "cpu",
        "__bool__",
        "__int__",
        "__float__",
        "__complex__",
        "__index__",
        "__array__",
        "__contains__",
        "__repr__",
        "__format__",
        "allclose",
        "equal",
        "is_nonzero",
    }
)
"""Python calls on tensors that hand a value to the host."""

_PAGEABLE_CALLS = frozenset(
    {
        "tensor",
        "as_tensor",
        "asarray",
    }
)
"""Calls that make a tensor of pageable host memory; a GPU stream is waited for if it is to be on a device."""

_READING_OPS = frozenset(
    {
        "_local_scalar_dense",
        "item",
        "is_nonzero",
        "equal",
        "allclose",
        "nonzero",
        "nonzero_numpy",
        "argwhere",
        "masked_select",
        "bincount",
        "histc",
        "unique_dim",
        "unique_consecutive",
        "unique_dim_consecutive",
        "_unique",
        "_unique2",
        "multinomial",
    }
)
"""Operators whose result, or the shape of it, depends on values and so waits for them."""

_INDEX_OPS = frozenset(["index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"])


class HostRead(AssertionError):
    """Code under `no_host_reads` looked at a tensor's value."""


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Raise HostRead on any look at a tensor's value, or copy from pageable memory, in this thread."""
    with _NoReadingCalls(), _NoReadingOps():
        yield


class _NoReadingCalls(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READING_CALLS:
            raise HostRead(f"{name} reads a tensor's value on the host")
        if name in _PAGEABLE_CALLS:
            raise HostRead(f"{name} copies from pageable host memory")
        return func(*args, **(kwargs or {}))


class _NoReadingOps(TorchDispatchMode):
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in _READING_OPS:
            raise HostRead(f"{func} waits for a tensor's value")
        if name in _INDEX_OPS and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        ):
            raise HostRead(f"{func} with a mask waits for the number of its true entries")
        if name == "repeat_interleave" and _is_repeat_of_unknown_size(args, kwargs):
            raise HostRead(f"{func} without output_size waits for the sum of the repeats")
        if name == "where" and len(args) == 1:
            raise HostRead(f"{func} of a condition alone waits for the number of its true entries")
        result = func(*args, **kwargs)
        if name in ("_to_copy", "copy_") and _crosses_pageable(args, result):
            raise HostRead(f"{func} copies between a device and pageable host memory, and waits for it")
        return result


def _is_repeat_of_unknown_size(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    repeats = args[-1] if len(args) <= 2 else args[1]
    return isinstance(repeats, torch.Tensor) and kwargs.get("output_size") is None


def _crosses_pageable(args: Sequence[Any], result: torch.Tensor) -> bool:
    """Whether a copy (`_to_copy(source)` or `copy_(target, source)`) has pageable host memory at one end only."""
    source = next(arg for arg in reversed(args) if isinstance(arg, torch.Tensor))
    host = [end for end in (source, result) if end.device.type == "cpu"]
    return len(host) == 1 and not host[0].is_pinned()
