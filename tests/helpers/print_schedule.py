"""Prints what each step of a load with salts, shared prefixes and few pages did. Run as a program, in any process."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from stretto.cache.base import CacheKey
from stretto.device.checking import CheckingDevice
from stretto.request import SamplingParams
from stretto.runtime import Runtime
from tests.helpers.exact_model import ExactAttention, ExactModel
from tests.helpers.ranks import Recorder
from tests.helpers.simulation import small_config


def main() -> None:
    config = small_config(num_pages=11, overlap_depth=2)
    recorder = Recorder(lambda plan, results, output: None)
    runtime = Runtime(
        config,
        CheckingDevice(3),
        ExactModel(config.vocab_size),
        ExactAttention(config.num_pages, config.page_size),
        make_witness=lambda scheduler: recorder,
    )
    random = np.random.default_rng(0)
    for i in range(24):
        prompt = [1, 2, 3, 4, 5, 6, 7, 8][: 4 * (i % 3)] + random.integers(1, 11, 3).tolist()
        params = SamplingParams(temperature=float(i % 2), max_tokens=8, logit_bias={i % 11: 1.0, 3: -1.0})
        runtime.add(prompt, params, seed=i, priority=i % 3 - 1, cache_key=CacheKey(salt=f"client {i % 4}"))
        runtime.step()
    while runtime.has_work:
        runtime.step()
    for step in recorder.steps:
        print(step)


if __name__ == "__main__":
    main()
