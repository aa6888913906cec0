"""Milliseconds that sampling adds to a step, by what the rows ask for; beside it a plain torch sampler's.

    python benchmarks/sampler.py [--device cuda] [--threads 1] [--only penalties]

The plain one is what one would write first: softmax, sort, mask and `torch.multinomial` for the whole batch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from stretto.engine.adjustment import AdjustmentTables, adjust
from stretto.engine.sampler import SampledOut, sample
from stretto.engine.sampling_rows import SamplingMix, SamplingRows
from stretto.engine.scratch import Scratch

CASES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 50": {"top_k": 50},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "top_k 1000": {"top_k": 1000},
    "top_p 0.9": {"top_p": 0.9},
    "greedy, 5 logprobs": {"temperature": 0.0, "num_logprobs": 5},
}
ADJUSTMENTS: dict[str, dict[str, int]] = {
    "300 biases": {"biases": 300},
    "penalties, 100 tokens": {"length": 100},
    "penalties, 1000 tokens": {"length": 1000},
    "penalties, 8000 tokens": {"length": 8000},
}
"""Alone, without the choice that follows; beside it dense counts over the whole vocabulary."""


def rows_and_mix(count: int, vocabulary: int, case: dict[str, float]) -> tuple[SamplingRows, SamplingMix]:
    """Equal rows of a case, with a seed each, on the CPU."""
    rows = SamplingRows(
        temperature_S=torch.full((count,), case.get("temperature", 1.0), dtype=torch.float32),
        top_k_S=torch.full((count,), int(case.get("top_k", 0)), dtype=torch.int64),
        top_p_S=torch.full((count,), case.get("top_p", 1.0), dtype=torch.float32),
        min_p_S=torch.full((count,), case.get("min_p", 0.0), dtype=torch.float32),
        seed_S=torch.arange(count),
        position_S=torch.arange(count) + 100,
        min_position_S=torch.zeros(count, dtype=torch.int64),
        stop_ids_SE=torch.full((count, 4), -1, dtype=torch.int64),
    )
    mix = SamplingMix.of(
        vocabulary=vocabulary,
        temperature=rows.temperature_S.numpy(),
        top_k=rows.top_k_S.numpy(),
        top_p=rows.top_p_S.numpy(),
        min_p=rows.min_p_S.numpy(),
        position=rows.position_S.numpy(),
        min_position=rows.min_position_S.numpy(),
        num_logprobs=np.full(count, int(case.get("num_logprobs", -1))),
    )
    return rows, mix


def adjuster(
    logits_SV: torch.Tensor, case: dict[str, int], device: torch.device
) -> tuple[Callable[[], object], Callable[[], object]]:
    """(What changes the logits of rows that are all alike, the same with counts over the vocabulary.)"""
    rows, vocabulary = logits_SV.shape
    length, biases = case.get("length", 0), case.get("biases", 0)
    tables = AdjustmentTables(rows, device)
    tables.penalties_R3[:] = 1.1
    tables.is_penalised_R[:] = 1
    tables.prompt_length_R[:] = length // 2
    tables.bias_ids_RK[:, :biases] = torch.arange(biases, device=device) * 7
    tables.biases_RK[:, :biases] = 1.0
    generator = torch.Generator().manual_seed(0)
    token_ids_RL = torch.randint(0, vocabulary, (rows, length + 1), generator=generator).to(device)
    slot_S = torch.arange(rows, device=device)
    position_S = torch.full((rows,), length, device=device)
    plain_mix = rows_and_mix(rows, vocabulary, {})[1]
    mix = replace(plain_mix, num_penalised=rows if length else 0, penalised_length=length, max_biases=biases)
    scratch = Scratch()

    def dense() -> torch.Tensor:
        changed_SV = logits_SV.clone()
        if biases:
            changed_SV.scatter_add_(1, tables.bias_ids_RK[:, :biases], tables.biases_RK[:, :biases])
        if length:
            prompt_SL, output_SL = token_ids_RL[:, : length // 2], token_ids_RL[:, length // 2 : length]
            count_SV = torch.zeros_like(logits_SV).scatter_add_(
                1, output_SL, torch.ones_like(output_SL, dtype=torch.float32)
            )
            seen_SV = (count_SV > 0).scatter_(1, prompt_SL, True)
            scaled_SV = torch.where(changed_SV > 0, changed_SV / 1.1, changed_SV * 1.1)
            changed_SV = torch.where(seen_SV, scaled_SV, changed_SV) - 1.1 * count_SV - 1.1 * (count_SV > 0)
        return changed_SV

    return lambda: adjust(logits_SV, tables, token_ids_RL, slot_S, position_S, mix, scratch), dense


def plain_sampler(logits_SV: torch.Tensor, case: dict[str, float]) -> torch.Tensor:
    """The same request in a few lines of torch: one sort, one multinomial."""
    if case.get("temperature", 1.0) == 0:
        return logits_SV.argmax(1)
    probability_SV = logits_SV.softmax(1)
    if "min_p" in case:
        probability_SV = probability_SV * (probability_SV >= case["min_p"] * probability_SV.amax(1, keepdim=True))
    if "top_k" in case or "top_p" in case:
        probability_SV, ids_SV = probability_SV.sort(1, descending=True)
        probability_SV[:, int(case.get("top_k", logits_SV.shape[1])) :] = 0
        mass_SV = probability_SV.cumsum(1)
        probability_SV *= (mass_SV - probability_SV) < case.get("top_p", 1.0) * mass_SV[:, -1:]
        return ids_SV.gather(1, probability_SV.multinomial(1)).squeeze(1)
    return probability_SV.multinomial(1).squeeze(1)


def milliseconds(work: Callable[[], object], device: torch.device, budget_s: float = 0.25) -> float:
    """Median time of a call, after two to warm up."""
    times: list[float] = []
    for call in range(1000):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if call >= 2:
            times.append(time.perf_counter() - start)
        if sum(times) > budget_s and len(times) >= 3:
            break
    return statistics.median(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[49152, 151936])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    print(f"ms per call on {device}, {arguments.threads} threads: stretto (plain torch)")
    print(f"{'vocabulary':>10}  {'case':<22}" + "".join(f"{count:>12} rows" for count in arguments.rows))
    for vocabulary in arguments.vocabulary:
        for name, case in CASES.items():
            if arguments.only not in name:
                continue
            cells = []
            for count in arguments.rows:
                generator = torch.Generator().manual_seed(0)
                logits_SV = (torch.randn(count, vocabulary, generator=generator) * 3).to(device)
                rows, mix = rows_and_mix(count, vocabulary, case)
                rows = rows.to(device)
                out = SampledOut.allocate(count, 5, device)
                with torch.inference_mode():
                    ours = milliseconds(lambda: sample(logits_SV, rows, mix, out), device)  # noqa: B023
                    plain = milliseconds(lambda: plain_sampler(logits_SV, case), device)  # noqa: B023
                cells.append(f"{ours:>7.2f} ({plain:>7.2f})")
            print(f"{vocabulary:>10}  {name:<22}" + " ".join(f"{cell:>17}" for cell in cells), flush=True)
        for name, adjustment in ADJUSTMENTS.items():
            if arguments.only not in name:
                continue
            cells = []
            for count in arguments.rows:
                generator = torch.Generator().manual_seed(0)
                logits_SV = (torch.randn(count, vocabulary, generator=generator) * 3).to(device)
                with torch.inference_mode():
                    work, dense = adjuster(logits_SV, adjustment, device)
                    cells.append(f"{milliseconds(work, device):>7.2f} ({milliseconds(dense, device):>7.2f})")
            print(f"{vocabulary:>10}  {name:<22}" + " ".join(f"{cell:>17}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
