"""The embedded model's real weights give the same greedy texts on a GPU as on a CPU.

Needs its file in Stretto's cache ($STRETTO_CACHE or ~/.cache/stretto): it is not fetched here. The texts are those of
`tests/data/smollm2_greedy.json`, which `tests/helpers/greedy_texts.py` recorded on a CPU in float32.
"""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

import pytest
import torch

from stretto import LLM
from stretto.models.embedded import SMOLLM2_135M, cached, default_cache_directory
from tests.helpers.greedy_texts import answers, stored

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture(scope="module")
def path() -> Path:
    found = cached(SMOLLM2_135M, default_cache_directory())
    if found is None:
        pytest.skip(
            f"{Path(SMOLLM2_135M.member).name} is not in {default_cache_directory()}; STRETTO_CACHE names another"
        )
    return found


def agreement(path: Path, **options: object) -> list[int]:
    """Of each chat, how many tokens are the CPU's before the first that is not; -1: all of them."""
    chats = stored()
    with LLM(str(path), device="cuda", kv_cache_memory_bytes=2**30, max_model_len=1024, **options) as llm:
        found = answers(llm, [chat["prompt_ids"] for chat in chats])
    agreed = []
    for chat, answer in zip(chats, found, strict=True):
        pairs = zip(chat["token_ids"], answer.token_ids, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        agreed.append(-1 if list(answer.token_ids) == chat["token_ids"] else same)
    return agreed


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"deterministic": True}], ids=str)
def test_float32_gives_the_texts_of_the_cpu(path: Path, options: dict[str, bool]) -> None:
    assert agreement(path, dtype="float32", **options) == [-1] * len(stored())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_begin_as_the_cpu_does(path: Path, dtype: str) -> None:
    """Rounding decides where two tokens are close; how far each text goes along is printed."""
    agreed = agreement(path, dtype=dtype)
    print(f"{dtype}: {agreed.count(-1)} of {len(agreed)} texts are the CPU's; the others leave it after {agreed}")
    assert agreed.count(-1) >= len(agreed) // 2
    assert all(tokens != 0 for tokens in agreed)
