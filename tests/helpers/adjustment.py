"""logit_bias and penalties by the book: the host recomputes everything from the whole sequence, one token at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from stretto.request import SamplingParams


def adjusted_logits(
    logits_V: npt.NDArray[np.float32], prompt: Sequence[int], output: Sequence[int], params: SamplingParams
) -> npt.NDArray[np.float32]:
    """The logits to sample from after `prompt` and `output`, each step rounded to float32."""
    adjusted = logits_V.astype(np.float32).copy()
    for token, bias in (params.logit_bias or {}).items():
        adjusted[token] += np.float32(bias)
    repetition, frequency, presence = (
        np.float32(value) for value in (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    )
    for token in {*prompt, *output}:
        logit = adjusted[token]
        adjusted[token] = logit / repetition if logit > 0 else logit * repetition
    for token, count in Counter(output).items():
        adjusted[token] -= np.float32(count) * frequency
        adjusted[token] -= presence
    return adjusted
