"""The guard against hidden syncs notices every kind of look at a tensor's value, and nothing else."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.helpers.no_sync import HostRead, no_host_reads

X = torch.arange(6)
LOOKS: dict[str, Callable[[], object]] = {
    "item": lambda: X[0].item(),
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
    "np.asarray": lambda: np.asarray(X),
    "cpu": lambda: X.cpu(),
    "truth": lambda: bool((X == X).all()),
    "if": lambda: 1 if (X > 2).any() else 0,
    "int": lambda: int(X[1]),
    "float": lambda: float(X[1]),
    "as an index": lambda: [1, 2, 3][X[1]],
    "as a slice bound": lambda: X[: X[2]],
    "in": lambda: 3 in X,
    "print": lambda: f"{X}",
    "equal": lambda: torch.equal(X, X),
    "allclose": lambda: torch.allclose(X, X),
    "nonzero": lambda: X.nonzero(),
    "where of one argument": lambda: torch.where(X > 2),
    "masked_select": lambda: X.masked_select(X > 2),
    "mask as an index": lambda: X[X > 2],
    "assignment through a tensor mask": lambda: X.clone().index_put_((X > 2,), X[:3]),
    "unique": lambda: X.unique(),
    "bincount": lambda: X.bincount(),
    "repeat_interleave": lambda: X.repeat_interleave(X),
    "torch.repeat_interleave": lambda: torch.repeat_interleave(X),
    "torch.tensor": lambda: torch.tensor([1, 2]),
}
WORK: dict[str, Callable[[], object]] = {
    "arithmetic": lambda: (X * 2 + 1).clamp(max=4),
    "where of three arguments": lambda: torch.where(X > 2, X, 0),
    "gather": lambda: X[X.flip(0)],
    "scatter": lambda: X.clone().index_put_((X,), X),
    "slices": lambda: X.clone()[1:3].copy_(X[2:4]),
    "topk": lambda: X.topk(2),
    "repeat_interleave of known size": lambda: X.repeat_interleave(X, output_size=15),
    "repeat_interleave by a number": lambda: X.repeat_interleave(2),
    "dtype": lambda: X.to(torch.float32),
    "shapes": lambda: (len(X), X.shape[0], X.is_pinned()),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", LOOKS)
def test_a_look_at_a_value_raises(name: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        LOOKS[name]()
        with pytest.raises(HostRead), no_host_reads():
            LOOKS[name]()


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", WORK)
def test_work_that_reads_nothing_passes(name: str, inference: bool) -> None:
    with torch.inference_mode(inference), no_host_reads():
        WORK[name]()


def test_nothing_is_forbidden_any_more_after_it() -> None:
    with no_host_reads():
        pass
    assert X[3].item() == 3
