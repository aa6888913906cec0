"""Takes the results of a step in: tokens, log-probabilities, ends. Vectorised over the rows of the step."""

from __future__ import annotations

import numpy as np

from stretto.request import FinishReason, Request, TokenArray, TokenLogprobs
from stretto.scheduler.batch import BoolArray, IntArray, StepPlan, StepResults
from stretto.scheduler.lifecycle import Lifecycle
from stretto.scheduler.slots import SlotTable


def take_in(
    plan: StepPlan, results: StepResults, slots: SlotTable, lifecycle: Lifecycle
) -> tuple[IntArray, TokenArray]:
    """(uids, tokens) that the step gave to requests that had not ended; ends those whose time has come. hot path

    Results for requests that have ended already (end-of-sequence found late, abort) are dropped here, before anything
    is reported or counted. Every end is judged by what the plan says of this step, never by live counters.
    """
    slots.in_flight[plan.slots_B] -= 1
    if plan.scored:
        _keep_prompt_logprobs(plan, results, slots)
    slots_S = plan.slots_B[plan.sampled_S]
    alive_S = slots.active[slots_S]
    tokens_S, position_S, is_last_S = results.tokens_S, plan.position_S, plan.is_last_S
    if not alive_S.all():
        for slot in slots_S[~alive_S & (tokens_S < 0)].tolist():
            lifecycle.distrust(slots.holder(slot))
        slots_S, tokens_S = slots_S[alive_S], tokens_S[alive_S]
        position_S, is_last_S = position_S[alive_S], is_last_S[alive_S]
    failed_S = tokens_S < 0
    slots.tokens[slots_S, position_S] = tokens_S
    slots.num_output[slots_S] = position_S + 1 - slots.prompt_len[slots_S] - failed_S
    stop_S = (slots.stop_ids[slots_S, : slots.stop_width] == tokens_S[:, None]).any(axis=1) & ~failed_S
    uids = slots.uid[slots_S]
    if plan.mix.num_logprobs >= 0:
        _keep_logprobs(slots, slots_S, results, alive_S, failed_S)
    for row in np.flatnonzero(stop_S | is_last_S | failed_S).tolist():
        request = slots.holder(int(slots_S[row]))
        if failed_S[row]:
            lifecycle.distrust(request)
            lifecycle.finish(request, FinishReason.ERROR)
        elif stop_S[row]:
            request.stop_token = int(tokens_S[row])
            lifecycle.finish(request, FinishReason.STOP)
        else:
            lifecycle.finish(request, FinishReason.LENGTH)
    if failed_S.any():
        uids, tokens_S = uids[~failed_S], tokens_S[~failed_S]
    lifecycle.release_processed()
    return uids, tokens_S.astype(np.int32)


def _keep_prompt_logprobs(plan: StepPlan, results: StepResults, slots: SlotTable) -> None:
    """Keep what the step says about prompts of requests that have not ended."""
    if results.scored is None:
        raise RuntimeError(f"step {plan.index} scores prompt tokens, but its results do not have them")
    at = 0
    for chunk in plan.scored:
        slot, count = int(plan.slots_B[chunk.row]), len(chunk.tokens)
        known = slots.holder(slot).prompt_logprobs
        if slots.active[slot] and known is not None:
            known.append(chunk.first, results.scored.part(at, at + count, chunk.num_tops))
        at += count


def _keep_logprobs(
    slots: SlotTable, slots_S: IntArray, results: StepResults, alive_S: BoolArray, failed_S: BoolArray
) -> None:
    """Keep the log-probabilities of the rows that asked, each with as many tops as it asked for."""
    rows = np.flatnonzero(alive_S)
    for i in np.flatnonzero(slots.wants_logprobs[slots_S] & ~failed_S).tolist():
        _append_logprobs(slots.holder(int(slots_S[i])), results, int(rows[i]))


def _append_logprobs(request: Request, results: StepResults, row: int) -> None:
    if request.logprobs is None or results.logprob_S is None or results.rank_S is None:
        raise RuntimeError(f"request {request.uid} asked for log-probabilities, but the step or the request has none")
    wanted = request.params.logprobs or 0
    tops = [] if results.top_ids_SL is None else results.top_ids_SL[row, :wanted].tolist()
    top_logprobs = [] if results.top_logprobs_SL is None else results.top_logprobs_SL[row, :wanted].tolist()
    request.logprobs.append(TokenLogprobs(float(results.logprob_S[row]), int(results.rank_S[row]), tops, top_logprobs))
