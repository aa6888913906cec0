"""Fixtures that more than one test file needs."""

import os

# Correctness does not depend on it, and the tests of several people share few cores. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest

from stretto.models.resolve import resolve_model


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The embedded model's GGUF file or directory. A test that needs it fails, rather than being skipped, without it."""
    return resolve_model("smollm2-135m", progress=print).path
