"""The JavaScript openai package finds what it expects."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.server_process import PATIENCE, ServerProcess

VERSION = "6.49.0"


@pytest.mark.skipif(shutil.which("node") is None or shutil.which("npm") is None, reason="node and npm are not here")
def test_the_javascript_client_streams_and_sees_errors(server: ServerProcess, request: pytest.FixtureRequest) -> None:
    directory = Path(request.config.cache.mkdir("openai-javascript"))
    if not (directory / "node_modules" / "openai").is_dir():
        command = ["npm", "install", "--silent", "--no-audit", "--no-fund", f"openai@{VERSION}"]
        subprocess.run(command, cwd=directory, check=True, timeout=PATIENCE)
    shutil.copy(Path(__file__).parent / "js" / "smoke.mjs", directory)
    done = subprocess.run(
        ["node", "smoke.mjs", server.url + "/v1"], cwd=directory, check=True, timeout=PATIENCE, stdout=subprocess.PIPE
    )
    found = json.loads(done.stdout)
    assert found["text"] == found["whole"]
    assert found["usage"]["completion_tokens"] == 30
    assert found["refused"] == {"kind": "BadRequestError", "status": 400, "param": "temperature"}
    assert found["response"]
    assert found["models"] == ["tested"]
