"""Servers with random weights that many tests share; conftest.py makes them known to all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.helpers.dummy_model import write_dummy_model
from tests.helpers.server_process import PATIENCE, ServerProcess

if TYPE_CHECKING:
    import openai

CONTEXT = 1024


@pytest.fixture(scope="session")
def dummy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory without weights whose answers never end by themselves."""
    return write_dummy_model(tmp_path_factory.mktemp("server-model"), endless=True)


@pytest.fixture(scope="session")
def server(dummy_model: Path) -> Iterator[ServerProcess]:
    """A server for tests that leave it as they found it."""
    with ServerProcess(dummy_model, "--max-model-len", str(CONTEXT), "--max-num-seqs", "16") as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    """The official client."""
    import openai

    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE) as made:
        yield made
