"""The random numbers are a pure function of (seed, position, token id), the same everywhere, and look random."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from stretto.engine.random import (
    derive_seed,
    fresh_seed,
    hash_bits,
    negative_exponentials,
    negative_uniforms,
    row_keys,
    token_lanes,
    wrap_int64,
)

M32, M64 = 2**32 - 1, 2**64 - 1
SEEDS = [0, 1, -1, 42, 2**63 - 1, -(2**63), 0x9E3779B97F4A7C15 - 2**64]


def mix64(z: int) -> int:
    """SplitMix64's finaliser, on Python integers."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & M64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & M64
    return z ^ (z >> 31)


def bits_by_hand(seed: int, position: int, token: int) -> int:
    """The 31 bits as the module describes them, on Python integers."""
    key = mix64((seed & M64) ^ 0xD1B54A32D192ED03)
    key = mix64((key + (position + 1) * 0x9E3779B97F4A7C15) & M64)
    h = (token * 0x9E3779B1 & M32) ^ (key & M32)
    h ^= h >> 16
    h = (h * 0x7FEB352D + (key >> 32)) & M32
    h ^= h >> 15
    h = h * 0x846CA68B & M32
    # Folded to 31 bits: the complement of a number above 2**31 gives the same.
    h = h if h < 2**31 else h ^ M32
    return h ^ h >> 16


def uniform_grid(seeds: npt.ArrayLike, positions: npt.ArrayLike, tokens: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Uniforms [rows, tokens] for rows of (seed, position)."""
    seeds_S, positions_S = np.broadcast_arrays(np.atleast_1d(seeds).astype(np.int64), positions)
    keys_S = row_keys(seeds_S.copy(), positions_S.astype(np.int64))
    spare = np.empty((2, len(keys_S), len(np.asarray(tokens))), np.int32)
    return -negative_uniforms(keys_S, token_lanes(np.asarray(tokens, np.int32)), *spare).astype(np.float64)


def bits_of(keys: npt.NDArray[np.int64], tokens: npt.ArrayLike) -> npt.NDArray[np.int32]:
    shape = (len(keys), len(np.asarray(tokens)))
    return hash_bits(
        keys, token_lanes(np.asarray(tokens, np.int32)), np.empty(shape, np.int32), np.empty(shape, np.int32)
    )


def exponentials_of(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    spare = torch.empty((2, len(keys), tokens.shape[-1]), dtype=torch.int32)
    return -negative_exponentials(keys, token_lanes(tokens.to(torch.int32)), *spare)


def chi_square_excess(counts: npt.NDArray[np.int64]) -> float:
    """How many standard deviations the chi-square statistic of equally likely cells lies from its mean."""
    expected = counts.sum() / counts.size
    degrees = counts.size - 1
    return float((((counts - expected) ** 2).sum() / expected - degrees) / np.sqrt(2 * degrees))


def test_bits_are_those_of_the_described_hash() -> None:
    positions, tokens = [0, 1, 131071], [0, 1, 2, 49151, 262143]
    for seed in SEEDS:
        bits = bits_of(row_keys(np.array([seed] * 3), np.array(positions)), tokens)
        assert bits.tolist() == [[bits_by_hand(seed, position, token) for token in tokens] for position in positions]


def test_torch_and_numpy_agree_to_the_bit() -> None:
    seeds = np.array(SEEDS, np.int64)
    positions = np.arange(len(SEEDS), dtype=np.int64) * 977
    tokens = np.arange(5003, dtype=np.int32)
    spare = np.empty((2, len(seeds), len(tokens)), np.int32)
    theirs = negative_uniforms(row_keys(seeds, positions), token_lanes(tokens), *spare)
    keys = row_keys(torch.from_numpy(seeds), torch.from_numpy(positions))
    ours = negative_uniforms(keys, token_lanes(torch.from_numpy(tokens)), *torch.empty(spare.shape, dtype=torch.int32))
    np.testing.assert_array_equal(ours.numpy(), theirs)


def test_a_token_has_the_same_number_in_any_selection() -> None:
    keys = row_keys(torch.tensor([3, 4]), torch.tensor([10, 10]))
    everything = exponentials_of(keys, torch.arange(1000))
    chosen = torch.tensor([[999, 5, 5], [0, 17, 640]])
    some = exponentials_of(keys, chosen)
    assert torch.equal(some, everything.gather(1, chosen))


def test_uniforms_stay_inside_the_open_interval_and_exponentials_are_positive() -> None:
    extremes = torch.tensor([0, 1, 2**31 - 1], dtype=torch.int32).float().add(0.5)
    u = extremes * ((1 - 2.0**-24) * 2.0**-31)
    assert u.min() > 0
    assert u.max() < 1
    keys = row_keys(torch.arange(64), torch.zeros(64, dtype=torch.int64))
    e = exponentials_of(keys, torch.arange(60_000))
    assert e.min() > 0
    assert e.max() < 17
    assert abs(e.double().mean() - 1) < 4 / np.sqrt(e.numel())


@pytest.mark.parametrize("along", ["tokens", "positions", "seeds", "far seeds"])
def test_numbers_are_uniform_along_every_axis(along: str) -> None:
    n = np.arange(1 << 18)
    grids = {
        "tokens": lambda: uniform_grid(7, 3, n),
        "positions": lambda: uniform_grid(7, n, [11]),
        "seeds": lambda: uniform_grid(n, 3, [11]),
        "far seeds": lambda: uniform_grid(n << 40, 3, [11]),
    }
    u = grids[along]().ravel()
    assert abs(chi_square_excess(np.bincount((u * 4096).astype(int), minlength=4096))) < 4
    # Small numbers decide who is sampled: they must be right at every scale.
    for k in range(6, 15):
        expected = u.size * 2.0**-k
        assert abs((u < 2.0**-k).sum() - expected) < 4 * np.sqrt(expected)


@pytest.mark.parametrize("step", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 64), (0, 1, 1), (1, -1, 0), (0, 0, 1 << 15)])
def test_neighbours_in_seed_position_or_token_are_independent(step: tuple[int, int, int]) -> None:
    n, tokens = np.arange(512), np.arange(1024)
    ds, dp, dt = step
    a = uniform_grid(n, 2 * n + 5, tokens)
    b = uniform_grid(n + ds, 2 * n + 5 + dp, tokens + dt)
    cells = (a * 16).astype(int) * 16 + (b * 16).astype(int)
    assert abs(chi_square_excess(np.bincount(cells.ravel(), minlength=256))) < 4
    assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4 / np.sqrt(a.size)


def test_rows_are_independent_for_every_pair_of_tokens() -> None:
    u = uniform_grid(5, np.arange(4096), np.arange(256))
    correlation = np.corrcoef(u.T)[np.triu_indices(256, 1)] * np.sqrt(4096)
    assert abs(correlation.mean()) < 0.05
    assert 0.97 < correlation.std() < 1.03
    assert np.abs(correlation).max() < 5.5


@pytest.mark.parametrize("part", ["seed", "position", "token"])
def test_every_input_bit_flips_every_output_bit_half_of_the_time(part: str) -> None:
    rng = np.random.default_rng(1)
    seeds, positions = rng.integers(-(2**62), 2**62, 4000), rng.integers(0, 2**17, 4000)
    token = np.array([1234], np.int32)
    base = bits_of(row_keys(seeds, positions), token)
    for bit in range({"seed": 64, "position": 17, "token": 18}[part]):
        s, p, t = seeds, positions, token
        if part == "seed":
            s = seeds ^ np.int64(wrap_int64(1 << bit))
        elif part == "position":
            p = positions ^ (1 << bit)
        else:
            t = token ^ np.int32(1 << bit)
        flipped = (base ^ bits_of(row_keys(s, p), t)).view(np.uint32).ravel()
        shares = np.array([(flipped >> k & 1).mean() for k in range(31)])
        assert np.abs(shares - 0.5).max() < 0.05, bit


def test_no_two_rows_share_a_key() -> None:
    seeds, positions = np.meshgrid(np.arange(-300, 300), np.arange(600))
    keys = row_keys(seeds.ravel(), positions.ravel())
    assert len(np.unique(keys)) == keys.size


def test_the_first_sample_keeps_the_seed_and_the_others_differ() -> None:
    for seed in SEEDS:
        seeds = [derive_seed(seed, index) for index in range(64)]
        assert seeds[0] == seed
        assert len(set(seeds)) == 64
        assert seeds == [derive_seed(seed, index) for index in range(64)]
        assert all(-(2**63) <= s < 2**63 for s in seeds)
    assert derive_seed(2**64 + 5, 0) == 5


def test_samples_of_one_seed_are_independent() -> None:
    seeds = np.array([derive_seed(9, index) for index in range(512)])
    u = uniform_grid(seeds, 0, np.arange(1024))
    assert abs(chi_square_excess(np.bincount((u.ravel() * 1024).astype(int), minlength=1024))) < 4
    assert abs(np.corrcoef(u[:-1].ravel(), u[1:].ravel())[0, 1]) < 4 / np.sqrt(u.size)


def test_fresh_seeds_differ_and_fit_64_bits() -> None:
    seeds = [fresh_seed() for _ in range(1000)]
    assert len(set(seeds)) == 1000
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert min(seeds) < 0 < max(seeds)
