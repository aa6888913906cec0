"""A step's results survive the trip in one copied prefix, whatever its size."""

import pytest
import torch

from stretto.engine.packed_results import ResultLayout
from stretto.engine.sampler import SampledOut


@pytest.mark.parametrize("rows", [1, 4, 7])
@pytest.mark.parametrize("tops", [0, 1, 2, 5])
def test_the_prefix_of_a_step_holds_all_of_its_results(rows: int, tops: int) -> None:
    out = SampledOut.allocate(rows, tops, torch.device("cpu"))
    assert out.tokens_S.tolist() == [-1] * rows
    assert out.logprob_S.isnan().all()
    assert out.top_logprobs_SL.isnan().all()
    numbers = iter(range(1, 10_000))
    for tensor in (out.tokens_S, out.logprob_S, out.rank_S, out.top_ids_SL, out.top_logprobs_SL):
        tensor.copy_(torch.tensor([next(numbers) for _ in range(tensor.numel())]).view(tensor.shape))
    for count in range(rows + 1):
        for num_logprobs in (-1, 0, tops):
            words = out.layout.words_of(count, num_logprobs)
            host = torch.full_like(out.words, -(2**60))
            host[:words] = out.words[:words]
            views = out.layout.on_host(host.numpy())
            assert views.tokens_S[:count].tolist() == out.tokens_S[:count].tolist()
            if num_logprobs >= 0:
                assert views.logprob_S[:count].tolist() == out.logprob_S[:count].tolist()
                assert views.rank_S[:count].tolist() == out.rank_S[:count].tolist()
            if num_logprobs > 0:
                assert views.top_ids_SL[:count].tolist() == out.top_ids_SL[:count].tolist()
                assert views.top_logprobs_SL[:count].tolist() == out.top_logprobs_SL[:count].tolist()


def test_what_nobody_asked_for_stays_on_the_device() -> None:
    layout = ResultLayout(256, 20)
    assert layout.words_of(8, -1) == 8
    assert layout.words_of(8, 20) < layout.words_of(9, 1) < layout.num_words
