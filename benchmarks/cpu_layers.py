"""Linear layers of SmolLM2's shapes in every weight format, against plain float32: `python benchmarks/cpu_layers.py`.

Microseconds of all four matrices of one layer, and of the output head, per call; between two calls of a shape enough
other weights are read that each call finds its own in memory, not in a cache, as in a decode step. Then the small
operations between them. All alternate within one run; medians.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from stretto.layers.activation import silu_and_mul
from stretto.layers.formats import WEIGHT_FORMATS, activation_dtype
from stretto.layers.linear import Linear, make_linear
from stretto.layers.norm import RMSNorm
from stretto.layers.rope import Rope, apply_rope

HIDDEN, FFN, VOCABULARY = 576, 1536, 49152
SHAPES = ((960, HIDDEN), (HIDDEN, HIDDEN), (2 * FFN, HIDDEN), (HIDDEN, FFN))
COPIES = 10
BATCHES = (1, 8, 32, 512)
CPU = torch.device("cpu")


def medians(ways: dict[str, Callable[[], object]], rounds: int = 9) -> dict[str, float]:
    """Median microseconds of each, all alternating."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for call in ways.values():
        call()
    for _ in range(rounds):
        for name, call in ways.items():
            begin = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - begin) * 1e6)
    return {name: sorted(t)[len(t) // 2] for name, t in times.items()}


def through(layers: list[Linear], inputs: dict[int, torch.Tensor]) -> Callable[[], None]:
    """Every layer once, on the input of its width."""

    def call() -> None:
        for layer in layers:
            layer(inputs[layer.in_features])

    return call


def linears() -> None:
    """One line for each batch, layers and head."""
    weights = [torch.randn(shape) * 0.05 for shape in SHAPES]
    head_weight = torch.randn(VOCABULARY, HIDDEN) * 0.05
    plain = [weight.clone() for _ in range(COPIES) for weight in weights]
    layers = {name: [make_linear(w, None, name) for _ in range(COPIES) for w in weights] for name in WEIGHT_FORMATS}
    heads = {name: make_linear(head_weight, None, name, head=True) for name in WEIGHT_FORMATS}
    for batch in BATCHES:
        x = {width: torch.randn(batch, width) for width in (HIDDEN, FFN)}
        ways: dict[str, Callable[[], object]] = {"F.linear": lambda x=x: [F.linear(x[w.shape[1]], w) for w in plain]}
        head_ways: dict[str, Callable[[], object]] = {"F.linear": lambda x=x: F.linear(x[HIDDEN], head_weight)}
        for name in WEIGHT_FORMATS:
            cast = {width: value.to(activation_dtype(name, CPU)) for width, value in x.items()}
            ways[name] = through(layers[name], cast)
            head_ways[name] = through([heads[name]], cast)
        rows = [("layer", {way: us / COPIES for way, us in medians(ways, 5).items()})]
        if batch <= 32:
            rows.append(("head", medians(head_ways, 5)))
        for what, found in rows:
            cells = ", ".join(f"{way} {us:.0f} ({us / found['F.linear']:.2f})" for way, us in found.items())
            print(f"{what} of {batch} rows, us (x F.linear): {cells}", flush=True)


def small_operations() -> None:
    """One line for each batch and element type; torch's own RMSNorm beside ours."""
    turns_of = Rope(torch.rand(32), 1024)
    for dtype in (torch.float32, torch.bfloat16):
        norm = RMSNorm(torch.rand(HIDDEN), 1e-5, dtype)
        for batch in BATCHES:
            x_TD, other_TD = torch.randn(2, batch, HIDDEN).to(dtype)
            qkv_TXH, gate_up = torch.randn(batch, 15, 64).to(dtype), torch.randn(batch, 2 * FFN).to(dtype)
            turns = turns_of.turns(torch.arange(batch))
            ways: dict[str, Callable[[], object]] = {
                "F.rms_norm": lambda x=x_TD, norm=norm: F.rms_norm(x, (HIDDEN,), norm.weight_D, 1e-5),
                "RMSNorm": lambda x=x_TD, norm=norm: norm(x),
                "RMSNorm.add": lambda x=x_TD, y=other_TD, norm=norm: norm.add(x, y),
                "apply_rope": lambda q=qkv_TXH, t=turns: apply_rope(q[:, :12], t),
                "silu_and_mul": lambda g=gate_up: silu_and_mul(g),
            }
            cells = ", ".join(f"{way} {us:.1f}" for way, us in medians(ways, 101).items())
            print(f"{str(dtype)[6:]}, {batch} rows, us: {cells}", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        linears()
        small_operations()
