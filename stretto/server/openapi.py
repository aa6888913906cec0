"""The OpenAPI document, made from the types that requests are read into: what it says is what is checked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from stretto.server.errors import ErrorResponse
from stretto.version import __version__

_REF = "#/components/schemas/{name}"
_ERRORS = ("400", "401", "404", "405", "408", "413", "429", "431", "500", "503", "504")


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    text: str
    body: Any
    """Type of the request's body, or None."""
    answer: Any
    """Type of the answer, or None where it is not worth one."""


def document(operations: Sequence[Operation], has_keys: bool) -> dict[str, Any]:
    """The whole document."""
    types = [kind for operation in operations for kind in (operation.body, operation.answer) if kind is not None]
    _, components = msgspec.json.schema_components([*types, ErrorResponse], ref_template=_REF)
    for kind in types:
        if kind in [operation.body for operation in operations]:
            components[kind.__name__]["additionalProperties"] = False
    paths: dict[str, Any] = {}
    for operation in operations:
        path = re.sub(r"\{(\w+):\w+\}", r"{\1}", operation.path)
        paths.setdefault(path, {})[operation.method.lower()] = _describe(operation, path)
    result: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Stretto", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }
    if has_keys:
        result["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        result["security"] = [{"key": []}]
    return result


def _describe(operation: Operation, path: str) -> dict[str, Any]:
    good: dict[str, Any] = {"description": "Done."}
    kind = "text/plain" if path == "/metrics" else "application/json"
    schema = {"type": "string"} if path == "/metrics" else {"type": "object"}
    content: dict[str, Any] = {kind: {"schema": schema if operation.answer is None else _ref(operation.answer)}}
    if operation.body is not None and "stream" in operation.body.__struct_fields__:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    good["content"] = content
    error = {"description": "An error.", "content": {"application/json": {"schema": _ref(ErrorResponse)}}}
    described: dict[str, Any] = {
        "summary": operation.text.split("\n")[0],
        "operationId": re.sub(r"\W+", "_", f"{operation.method.lower()}{path}").strip("_"),
        "responses": {"200": good, **dict.fromkeys(_ERRORS, error)},
    }
    names = re.findall(r"\{(\w+)\}", path)
    if names:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(operation.body)}}}
    return described


def _ref(kind: Any) -> dict[str, str]:
    return {"$ref": _REF.format(name=kind.__name__)}
