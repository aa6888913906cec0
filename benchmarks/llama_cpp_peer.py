"""llama.cpp's side of `throughput.py`: the same prompts, continuous decoding of all of them in one batch, greedy.

Runs in any interpreter that has the `llama_cpp` binding (`pip install llama-cpp-python`) and NumPy; Stretto is not
imported. Prints one JSON object: output tokens per second by batch size, prefill included, and `decode N` without it.

    python benchmarks/llama_cpp_peer.py MODEL.gguf '{"threads": 2, "new": 128, "prompts": {"1": [[1, 2, 3]]}}'
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import llama_cpp as lib
import numpy as np


def add(batch: Any, token: int, position: int, sequence: int, *, wants_logits: bool) -> None:
    """Put one token into a batch."""
    i = batch.n_tokens
    batch.token[i], batch.pos[i] = token, position
    batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
    batch.logits[i] = wants_logits
    batch.n_tokens += 1


def decode(context: Any, batch: Any) -> None:
    """Run a batch."""
    if code := lib.llama_decode(context, batch):
        raise RuntimeError(f"llama_decode gave {code}")


def generate(context: Any, prompts: list[list[int]], new: int, vocabulary: int, room: int) -> tuple[float, float]:
    """Answer all prompts with `new` tokens each; seconds in all, and without the prefill."""
    lib.llama_memory_clear(lib.llama_get_memory(context), True)
    batch = lib.llama_batch_init(room, 0, 1)

    def choose(row: int) -> int:
        return int(np.argmax(np.ctypeslib.as_array(lib.llama_get_logits_ith(context, row), (vocabulary,))))

    started = time.perf_counter()
    tokens, lengths = [0] * len(prompts), [len(prompt) for prompt in prompts]
    last: dict[int, int] = {}

    def flush() -> None:
        decode(context, batch)
        for sequence, row in last.items():
            tokens[sequence] = choose(row)
        last.clear()
        batch.n_tokens = 0

    batch.n_tokens = 0
    for sequence, prompt in enumerate(prompts):
        for position, token in enumerate(prompt):
            if batch.n_tokens == room:
                flush()
            is_last = position == len(prompt) - 1
            if is_last:
                last[sequence] = batch.n_tokens
            add(batch, token, position, sequence, wants_logits=is_last)
    flush()
    prefilled = time.perf_counter()
    for step in range(new - 1):
        batch.n_tokens = 0
        for sequence, token in enumerate(tokens):
            add(batch, token, lengths[sequence] + step, sequence, wants_logits=True)
        decode(context, batch)
        tokens = [choose(row) for row in range(len(prompts))]
    ended = time.perf_counter()
    lib.llama_batch_free(batch)
    return ended - started, ended - prefilled


def main() -> None:
    """Measure the batch sizes that were asked for."""
    task = json.loads(sys.argv[2])
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(sys.argv[1].encode(), lib.llama_model_default_params())
    vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    rates: dict[str, float] = {}
    for name, prompts in task["prompts"].items():
        count, new = len(prompts), task["new"]
        options = lib.llama_context_default_params()
        options.n_ctx = count * 512
        options.n_seq_max = count
        options.n_batch = options.n_ubatch = 512
        options.n_threads = options.n_threads_batch = task["threads"]
        context = lib.llama_init_from_model(model, options)
        generate(context, prompts, 8, vocabulary, 512)
        whole, decoding = generate(context, prompts, new, vocabulary, 512)
        rates[name] = count * new / whole
        rates[f"decode {name}"] = count * (new - 1) / decoding
        lib.llama_free(context)
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
