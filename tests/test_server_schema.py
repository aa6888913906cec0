"""Requests made from our own OpenAPI document find no 5xx and no hang."""

from __future__ import annotations

import json

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy
from schemathesis import Case, GenerationMode

from stretto.server.app import build_app
from stretto.server.frontend import Frontend
from stretto.server.openapi import Operation, document
from stretto.server.settings import ServerConfig
from tests.helpers.server_process import PATIENCE, ServerProcess

EXAMPLES = 15


def test_the_document_names_every_route_and_only_fields_that_are_read(server: ServerProcess) -> None:
    status, body = server.get("/openapi.json")
    assert status == 200
    paths = json.loads(body)["paths"]
    expected = {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/v1/models/{model}"),
        *("/tokenize", "/detokenize", "/health", "/ready", "/live", "/version", "/metrics"),
    }
    assert expected <= set(paths)
    assert server.get("/docs")[0] == 200


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=str)
def test_no_generated_request_finds_a_server_error(server: ServerProcess, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
    operations = [operation.ok() for operation in schema.get_all_operations()]
    assert len(operations) >= 12
    for operation in operations:
        if mode is GenerationMode.NEGATIVE and operation.method == "get":
            continue  # nothing about them could be wrong
        find_errors(operation.as_strategy(generation_mode=mode))


def find_errors(cases: SearchStrategy[Case]) -> None:
    """Call the server with some of these."""

    @given(case=cases)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case: Case) -> None:
        shorten(case)
        response = case.call(timeout=PATIENCE)
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    check()


def shorten(case: Case) -> None:
    """Answers of generated requests need not be long."""
    if isinstance(case.body, dict) and case.path.startswith("/v1/"):
        limits = {"max_tokens", "max_completion_tokens", "max_output_tokens"} & set(case.body)
        for name in limits or {"max_output_tokens" if "responses" in case.path else "max_tokens"}:
            if type(case.body.get(name, 4)) is int:
                case.body[name] = min(case.body.get(name, 4), 4)


def test_a_document_needs_no_server() -> None:
    frontend = Frontend(ServerConfig(api_keys=("x",)), "model")
    assert build_app(frontend) is not None
    made = document([Operation("GET", "/x/{name:path}", "Text.", None, None)], True)
    assert list(made["paths"]) == ["/x/{name}"]
    assert made["security"] == [{"key": []}]
