"""Call chains of an Nsight Systems export: who made a call into CUDA (`nsys profile --cudabacktrace=all`).

Owns the choice of the frames that are shown. A chain is a list of functions, each with the module that holds it; in a
Python program most of them are the interpreter's and the libraries', and say nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

Rows = Callable[[str, dict[str, str]], Iterator[tuple[Any, ...]]]

_NO_NAME = re.compile(r"^(0x[0-9a-fA-F]+|\[.*\]|)$")
_PLUMBING = re.compile(
    r"^(_?Py[A-Z_]|_?PyEval|py::|pybind11|cfunction_|method_vectorcall|vectorcall|builtin_|slot_tp_|object_vacall|type_call"
    r"|_start$|__libc_start|clone|start_thread|main$|run_mod|pymain_|Py_)"
)
_LIBRARIES = re.compile(
    r"^(libcuda|libcudart|libcupti|libnvrtc|libToolsInjection|libpthread|libc[.-]|ld-linux|libstdc)"
)


class CallChains:
    """The chains of an export, read at once; empty if it has none."""

    def __init__(self, rows: Rows, strings: dict[int, str]) -> None:
        self._chains: dict[int, list[tuple[int, str]]] = {}
        columns = {"id": "NULL", "symbol": "NULL", "module": "NULL", "unresolved": "0", "stackDepth": "0"}
        for chain, symbol, module, unresolved, depth in rows("CUDA_CALLCHAINS", columns):
            name = strings.get(symbol, "")
            if chain is None or unresolved or _NO_NAME.match(name):
                continue
            place = _frame(name, strings.get(module, ""))
            if place:
                self._chains.setdefault(chain, []).append((depth, place))
        self._frames = {
            chain: [place for _, place in sorted(found, reverse=True)] for chain, found in self._chains.items()
        }

    def frames(self, chain: int | None) -> list[str]:
        """Names of the frames of a chain, outermost first; depth 0 is the innermost."""
        return [] if not chain else self._frames.get(chain, [])


def _frame(symbol: str, module: str) -> str:
    """A frame's name, as "file(?): function" if the module is a source file; "" if it says nothing."""
    library = module.replace("\\", "/").rsplit("/", 1)[-1]
    if library.endswith(".py"):
        return f"{module}(?): {symbol}"
    if _LIBRARIES.match(library) or _PLUMBING.match(symbol):
        return ""
    return f"{symbol} [{library}]" if library else symbol
