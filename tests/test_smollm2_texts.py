"""The greedy texts that a GPU must give are the ones that a CPU gives."""

from __future__ import annotations

from pathlib import Path

from stretto import LLM
from tests.helpers.greedy_texts import LEAST_LEAD, QUESTIONS, answers, stored


def test_stored_texts_are_the_cpus(smollm2_path: Path) -> None:
    """Two short ones; the others take long."""
    chats = stored()
    assert tuple(chat["question"] for chat in chats) == QUESTIONS
    assert all(chat["least_lead"] >= LEAST_LEAD for chat in chats)
    short = sorted(chats, key=lambda chat: len(chat["token_ids"]))[:2]
    with LLM(str(smollm2_path), dtype="float32", device="cpu", max_num_seqs=4, max_model_len=256) as llm:
        found = answers(llm, [chat["prompt_ids"] for chat in short])
    assert [list(answer.token_ids) for answer in found] == [chat["token_ids"] for chat in short]
    assert [answer.text for answer in found] == [chat["text"] for chat in short]
