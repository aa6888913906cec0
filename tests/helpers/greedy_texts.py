"""Greedy texts of the embedded model on a CPU in float32, which other devices must give too.

`python -m tests.helpers.greedy_texts` records them. Ten chats; each token's lead over the second best is recorded, so
that equality is never asked for where rounding could decide.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stretto import LLM, SamplingParams

PATH = Path(__file__).parents[1] / "data" / "smollm2_greedy.json"
QUESTIONS = (
    "What is the capital of France?",
    "What do bees do in winter?",
    "Tell me a fun fact about octopuses.",
    "Why is the sky blue?",
    "Name three primary colours.",
    "What is 12 plus 30?",
    "Explain gravity to a child.",
    "Give me a recipe for pancakes.",
    "Who wrote Romeo and Juliet?",
    "Write a Python function that adds two numbers.",
)
TOKENS = 40
LEAST_LEAD = 1e-2
"""Of the chosen token's logit. Float32 sums in another order move logits of this model by less than 1e-4."""


def answers(llm: LLM, prompts: list[list[int]], *, logprobs: int | None = None) -> list[Any]:
    """Greedy completions of prompts of token ids, all in one batch."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=logprobs)
    return [output.outputs[0] for output in llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)]


def stored() -> list[dict[str, Any]]:
    """Of each chat: question, prompt_ids, token_ids, text, least_lead."""
    found: list[dict[str, Any]] = json.loads(PATH.read_text())
    return found


def record() -> None:
    """Write the file. Raises if a token leads by too little to be asked of another device."""
    from stretto.models.embedded import SMOLLM2_135M, default_cache_directory, fetch

    path = fetch(SMOLLM2_135M, default_cache_directory(), print)
    rows = []
    with LLM(str(path), dtype="float32", device="cpu", max_num_seqs=16) as llm:
        prompts = [
            output.prompt_token_ids
            for output in llm.chat(
                [[{"role": "user", "content": question}] for question in QUESTIONS],
                SamplingParams(temperature=0, max_tokens=1),
            )
        ]
        for question, ids, answer in zip(QUESTIONS, prompts, answers(llm, prompts, logprobs=2), strict=True):
            leads = []
            for tops in answer.logprobs:
                best, second = sorted((entry.logprob for entry in tops.values()), reverse=True)[:2]
                leads.append(best - second)
            print(f"{min(leads):.4f} {question} -> {answer.text!r}")
            rows.append(
                {
                    "question": question,
                    "prompt_ids": list(ids),
                    "token_ids": list(answer.token_ids),
                    "text": answer.text,
                    "least_lead": round(min(leads), 5),
                }
            )
    if min(row["least_lead"] for row in rows) < LEAST_LEAD:
        raise SystemExit("a lead below LEAST_LEAD: choose another question")
    PATH.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    record()
