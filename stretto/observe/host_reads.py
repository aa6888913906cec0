"""Recognises torch calls that make the host wait for a device, before they run. Two torch modes for one thread.

Owns the lists of such calls. On a machine without a GPU host tensors may stand for device tensors (`cpu_as_device`), so
that a look at a value is found where it costs nothing. Both modes hold for the thread that entered them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Seen = Callable[[str, str, Callable[[], Any]], Any]
"""(kind, name of the call, the call itself): told of a call that waits; answers with its result, or raises."""

READING_CALLS = {
    "item": "item",
    "__int__": "item",
    "__float__": "item",
    "__complex__": "item",
    "__index__": "item",
    "__repr__": "item",
    "__format__": "item",
    "tolist": "tolist",
    "numpy": "to-host",
    "cpu": "to-host",
    "__array__": "to-host",
    "__bool__": "truth-value",
    "is_nonzero": "truth-value",
    "__contains__": "compare",
    "allclose": "compare",
    "equal": "compare",
}
"""Python calls on tensors that hand a value to the host, and their kind (the kinds are in `trace/kinds.py`)."""

UPLOADING_CALLS = frozenset(["tensor", "as_tensor", "asarray"])
"""Calls that make a tensor of pageable host memory; a stream is waited for if it is to be on a device."""

READING_OPERATORS = {
    "_local_scalar_dense": "item",
    "item": "item",
    "is_nonzero": "truth-value",
    "equal": "compare",
    "allclose": "compare",
    **dict.fromkeys(
        [
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
        ],
        "nonzero",
    ),
}
"""Operators whose result, or the shape of it, depends on values and so waits for them."""

_INDEX_OPERATORS = frozenset(
    ["index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"]
)


class Calls(TorchFunctionMode):
    """Sees Python's calls of torch functions and of tensors' methods."""

    def __init__(self, seen: Seen, cpu_as_device: bool) -> None:
        super().__init__()
        self._seen = seen
        self._cpu_as_device = cpu_as_device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        kind = READING_CALLS.get(name)
        if kind is not None:
            if self._cpu_as_device or any(isinstance(arg, torch.Tensor) and arg.is_cuda for arg in args):
                return self._seen(kind, name, lambda: func(*args, **kwargs))
        elif name in UPLOADING_CALLS and (self._cpu_as_device or self._uploads(args, kwargs)):
            return self._seen("pageable-upload", f"torch.{name}", lambda: func(*args, **kwargs))
        return func(*args, **kwargs)

    @staticmethod
    def _uploads(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        target = kwargs.get("device")
        device = torch.get_default_device() if target is None else torch.device(target)
        source = args[0] if args else None
        return device.type == "cuda" and not isinstance(source, torch.Tensor)  # a tensor's copy is seen as an operator


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operators that run, those inside other calls too."""

    def __init__(self, seen: Seen, cpu_as_device: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen
        self._cpu_as_device = cpu_as_device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch asks. If yes, it imports its compiler with the first operator that is seen: seconds, in a step."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        kind = self._kind(name, args, kwargs)
        if kind is None:
            return func(*args, **kwargs)
        return self._seen(kind, str(func), lambda: func(*args, **kwargs))

    def _kind(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
        if name == "copy_":
            return _copy_kind(args[1], args[0].device, args[0], non_blocking=_given(args, kwargs, 2, "non_blocking"))
        if name == "_to_copy":
            target = kwargs.get("device")
            if target is None:
                return None
            return _copy_kind(args[0], torch.device(target), None, non_blocking=bool(kwargs.get("non_blocking")))
        kind = READING_OPERATORS.get(name)
        if kind is None:
            if name in _INDEX_OPERATORS:
                masked = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
                kind = "nonzero" if masked else None
            elif name == "repeat_interleave" and _is_repeat_of_unknown_size(args, kwargs):
                kind = "repeat-interleave"
            elif name == "where" and len(args) == 1:
                kind = "nonzero"
        if kind is None or self._cpu_as_device:
            return kind
        return kind if any(isinstance(arg, torch.Tensor) and arg.is_cuda for arg in args) else None


def _is_repeat_of_unknown_size(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    repeats = args[-1] if len(args) <= 2 else args[1]
    return isinstance(repeats, torch.Tensor) and kwargs.get("output_size") is None


def _given(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str) -> bool:
    return bool(args[place] if len(args) > place else kwargs.get(name))


def _copy_kind(
    source: torch.Tensor, to: torch.device, target: torch.Tensor | None, *, non_blocking: bool
) -> str | None:
    """Kind of a copy between host and device, None if it does not wait. `target` None: it is yet to be allocated."""
    if (source.device.type == "cpu") == (to.type == "cpu"):
        return None
    if source.device.type != "cpu":
        # Torch pins what it allocates itself for a copy that shall not block.
        pinned = target is None or target.is_pinned()
        return None if non_blocking and pinned else "to-host"
    if not source.is_pinned():
        return "pageable-upload"
    return None if non_blocking else "upload"
