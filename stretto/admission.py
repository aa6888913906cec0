"""Admission: which requests may enter an engine, and what becomes of one that may. Host only; holds no requests.

Every refusal says what was given and what is allowed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stretto.cache.base import CacheKey
from stretto.config import SchedulerConfig
from stretto.engine.random import fresh_seed
from stretto.errors import InvalidRequest, Overloaded
from stretto.request import Request, SamplingParams, TokenArray


def _array_of(prompt_ids: Sequence[int] | TokenArray) -> npt.NDArray[Any]:
    """Of any shape and dtype; empty, of objects, if NumPy cannot read it. Lists take half of NumPy's own time."""
    if isinstance(prompt_ids, (list, tuple)):
        try:
            return np.asarray(array("q", prompt_ids))
        except (TypeError, OverflowError):  # not whole numbers, or too large ones: NumPy says what they are
            pass
    try:
        return np.asarray(prompt_ids)
    except (ValueError, OverflowError):
        return np.empty(0, np.object_)


class Admission:
    """The entrance of one engine."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config

    def check(self, prompt_ids: Sequence[int] | TokenArray, params: SamplingParams) -> TokenArray:
        """`prompt_ids` as int32 if the engine can run them with `params`; otherwise raises InvalidRequest."""
        ids = self._check_prompt(prompt_ids)
        config = self._config
        for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if count is not None and count > config.max_logprobs:
                raise InvalidRequest(
                    f"{name} is {count}; allowed: up to {config.max_logprobs} (the engine's max_logprobs)"
                )
        self._check_vocabulary("stop_token_ids has", params.stop_token_ids or ())
        self._check_vocabulary("logit_bias has token", params.logit_bias or ())
        count = len({*(params.stop_token_ids or ()), *(() if params.ignore_eos else config.eos_ids)})
        if count > config.max_stop_ids:
            raise InvalidRequest(
                f"stop_token_ids has {count} ids, end-of-sequence ids included; allowed: up to {config.max_stop_ids}"
            )
        return ids

    def _check_prompt(self, prompt_ids: Sequence[int] | TokenArray) -> TokenArray:
        config = self._config
        ids, is_list = _array_of(prompt_ids), isinstance(prompt_ids, (list, tuple))
        is_flat = ids.ndim == 1 and (not len(ids) or np.issubdtype(ids.dtype, np.integer))
        # Only what is 0 or 1 can have been a bool.
        if not is_flat or (
            is_list and any(type(prompt_ids[index]) is bool for index in np.flatnonzero(ids <= 1).tolist())
        ):
            raise InvalidRequest(f"prompt token ids must be a flat list of whole numbers below {config.vocab_size}")
        if len(ids) == 0:
            raise InvalidRequest("the prompt is empty: it needs at least one token")
        bad = ids[(ids < 0) | (ids >= config.vocab_size)]
        if len(bad):
            raise InvalidRequest(
                f"token id {bad[0]} is not in the vocabulary: allowed are 0 to {config.vocab_size - 1}"
            )
        if len(ids) >= config.max_model_len:
            raise InvalidRequest(
                f"the prompt has {len(ids)} tokens; at most {config.max_model_len - 1} fit into the context length of "
                f"{config.max_model_len} with one new token: shorten it or raise max_model_len"
            )
        return ids.astype(np.int32)

    def _check_vocabulary(self, what: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if token_id >= self._config.vocab_size:
                raise InvalidRequest(
                    f"{what} {token_id}, which is not in the vocabulary: allowed are 0 to {self._config.vocab_size - 1}"
                )

    @property
    def limits_queue(self) -> bool:
        """Whether the queue's length matters at all."""
        return self._config.max_queued_requests is not None or self._config.max_queued_tokens is not None

    def check_queue(self, num_tokens: int, pending: int, pending_tokens: int, num_running: int) -> None:
        """Raise Overloaded if one more request, of `num_tokens` prompt tokens, would make the queue too long.

        `pending` requests have not started, with `pending_tokens` in all. As many of them as there are free slots start
        with the next step: the queue is what is left.
        """
        config = self._config
        waiting = pending - (config.max_num_seqs - num_running)
        if waiting < 0:
            return
        if config.max_queued_requests is not None and waiting >= config.max_queued_requests:
            raise Overloaded(f"{waiting} requests wait already; max_queued_requests is {config.max_queued_requests}")
        if config.max_queued_tokens is not None and pending_tokens + num_tokens > config.max_queued_tokens:
            raise Overloaded(
                f"{pending_tokens} prompt tokens wait already and the request brings {num_tokens}; max_queued_tokens "
                f"is {config.max_queued_tokens}"
            )

    def request(
        self,
        uid: int,
        ids: TokenArray,
        params: SamplingParams,
        *,
        seed: int | None,
        priority: int,
        cache_key: CacheKey,
    ) -> Request:
        """A request for a prompt that was checked; `seed` None takes fresh entropy."""
        config = self._config
        stop_ids = dict.fromkeys([] if params.ignore_eos else config.eos_ids)
        stop_ids.update(dict.fromkeys(params.stop_token_ids or ()))
        wanted = config.max_model_len if params.max_tokens is None else len(ids) + params.max_tokens
        return Request(
            uid=uid,
            prompt_ids=ids,
            params=params,
            seed=fresh_seed() if seed is None else seed,
            final_len=min(wanted, config.max_model_len),
            stop_ids=tuple(stop_ids),
            priority=priority,
            cache_key=cache_key,
            logprobs=None if params.logprobs is None else [],
        )
