"""Which lines of a function could be the one that blocks: guessed from its source, where that can be read.

For traces of programs in which no guard watched. Owns the patterns by which each kind of blocking call is written. A
guess is given only if the file still has that function at that line, and few lines of it match.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from stretto.observe.trace.names import frame

_MOST = 3  # lines: more than that help nobody
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_METHODS = {
    "item": ("item",),
    "tolist": ("tolist",),
    "to-host": ("cpu", "numpy", "to", "asarray", "array"),
    "nonzero": (
        *("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "histc", "multinomial"),
        "where",
    ),
    "compare": ("equal", "allclose"),
    "repeat-interleave": ("repeat_interleave",),
    "pageable-upload": ("tensor", "as_tensor", "asarray", "from_numpy", "to", "cuda", "copy_"),
    "upload": ("to", "cuda", "copy_"),
    "stream-sync": ("synchronize",),
    "device-sync": ("synchronize",),
    "event-sync": ("synchronize",),
    "allocation": ("pin_memory", "empty_cache", "empty", "zeros", "ones", "full", "cuda"),
}
"""Kind of blocking call -> methods and functions that make one."""
_BUILTINS = {"item": ("int", "float", "complex", "print"), "truth-value": ("bool", "any", "all")}


@dataclass(frozen=True, slots=True)
class Guess:
    """A line that may be meant, and what in it looks like the call."""

    line: int
    what: str


def probable_lines(location: str, kind: str, roots: tuple[Path, ...]) -> tuple[Guess, ...]:
    """The lines of the function at `location` (a frame) that can make a blocking call of this kind; () if unknown.

    Relative files are looked for under `roots`. Reads the file; never raises for one that is missing or no Python.
    """
    parts = frame(location)
    if parts is None or not parts[1]:
        return ()
    for path in [Path(parts[0])] if Path(parts[0]).is_absolute() else [root / parts[0] for root in roots]:
        tree = _parsed(path) if path.suffix == ".py" else None
        function = None if tree is None else _function(tree, parts[1], parts[2])
        if function is not None:
            found = sorted({(guess.line, guess.what) for guess in _guesses(function, kind)})
            lines = {line for line, _ in found}
            return tuple(Guess(line, what) for line, what in found) if len(lines) <= _MOST else ()
    return ()


@lru_cache(maxsize=64)
def _parsed(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def _function(tree: ast.Module, line: int, name: str) -> ast.AST | None:
    """The function of this name that begins at this line: with its first decorator, as Python counts."""
    for node in ast.walk(tree):
        if not isinstance(node, _FUNCTIONS) or node.name != name:
            continue
        if line == min([node.lineno, *(one.lineno for one in node.decorator_list)]):
            return node
    return None


def _own(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions in it, which have frames of their own."""
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (*_FUNCTIONS, ast.Lambda, ast.ClassDef)):
            waiting += ast.iter_child_nodes(node)


def _guesses(function: ast.AST, kind: str) -> list[Guess]:
    nodes = list(_own(function))
    if kind == "truth-value":
        tests = [(node, word) for parent in nodes for node, word in _tests(parent)]
        strong = [Guess(node.lineno, word) for node, word in tests if _has_call(node)]
        calls = _calls(nodes, (), _BUILTINS[kind])
        return strong or calls or [Guess(node.lineno, word) for node, word in tests if not _is_hosts(node)]
    found = _calls(nodes, _METHODS.get(kind, ()), ())
    if kind == "nonzero" and not found:
        found = [Guess(one.lineno, "[mask]") for one in nodes if isinstance(one, ast.Subscript) and _is_mask(one.slice)]
    return found or _calls(nodes, (), _BUILTINS.get(kind, ()))


def _calls(nodes: list[ast.AST], methods: tuple[str, ...], builtins: tuple[str, ...]) -> list[Guess]:
    found = []
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Attribute) and called.attr in methods:
            # Where a call spans lines, Python counts the line of the method's name.
            found.append(Guess(called.end_lineno or node.lineno, f".{called.attr}()"))
        elif isinstance(called, ast.Name) and called.id in (*builtins, *methods) and _has_value(node):
            found.append(Guess(node.lineno, f"{called.id}()"))
    return found


def _has_value(call: ast.Call) -> bool:
    return bool(call.args) and not isinstance(call.args[0], ast.Constant)


def _tests(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Expressions in a node of which Python needs the truth value, and the word that asks for it."""
    if isinstance(node, (ast.If, ast.IfExp)):
        yield node.test, "if"
    elif isinstance(node, ast.While):
        yield node.test, "while"
    elif isinstance(node, ast.Assert):
        yield node.test, "assert"
    elif isinstance(node, ast.comprehension):
        for test in node.ifs:
            yield test, "if"
    elif isinstance(node, ast.BoolOp):
        for value in node.values[:-1]:
            yield value, "and" if isinstance(node.op, ast.And) else "or"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand, "not"


def _has_call(test: ast.expr) -> bool:
    """The test is made by a method such as `.all()`: nothing that the host knows by itself."""
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("all", "any", "sum", "max", "min", "eq", "ne", "gt", "lt", "ge", "le", "isnan", "isinf")
        for node in ast.walk(test)
    )


def _is_hosts(test: ast.expr) -> bool:
    """A test that no tensor is asked in: `x is None`, isinstance(), constants."""
    if isinstance(test, ast.Compare):
        return any(isinstance(op, (ast.Is, ast.IsNot, ast.In, ast.NotIn)) for op in test.ops) or any(
            isinstance(one, ast.Constant) and isinstance(one.value, str) for one in test.comparators
        )
    if isinstance(test, ast.Call) and isinstance(test.func, ast.Name):
        return test.func.id in ("isinstance", "issubclass", "hasattr", "callable", "len")
    if isinstance(test, (ast.BoolOp, ast.UnaryOp)):
        return True  # its parts are asked one by one
    return isinstance(test, ast.Constant)


def _is_mask(index: ast.expr) -> bool:
    return isinstance(index, ast.Compare) or (isinstance(index, ast.UnaryOp) and isinstance(index.op, ast.Invert))
