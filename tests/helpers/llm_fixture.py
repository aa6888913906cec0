"""One LLM with random weights for all tests of a file, and the check that it is idle after each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from stretto import LLM
from tests.helpers.dummy_model import write_dummy_model


@pytest.fixture(scope="module")
def shared_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Use `llm` instead."""
    with dummy_llm(tmp_path_factory.mktemp("model")) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """A ready LLM; every page must be free again when the test has ended."""
    yield shared_llm
    assert_idle(shared_llm)


def dummy_llm(directory: Any, **options: Any) -> LLM:
    """A new LLM with the dummy model written to `directory`."""
    options = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 8, **options}
    return LLM(str(write_dummy_model(directory)), load_format="dummy", **options)


def assert_idle(llm: LLM) -> None:
    """Nothing runs or waits, and all pages are free."""
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_pages) == (0, 0, stats.num_pages)
