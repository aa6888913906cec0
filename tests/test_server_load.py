"""Under load: many clients at once, a real model, and a minute of the soak."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import openai

from stretto import LLM, SamplingParams
from tests.helpers.server_process import PATIENCE, ServerProcess


def test_a_minute_of_soak_finds_no_leak_and_no_wrong_answer() -> None:
    script = Path(__file__).parents[1] / "scripts" / "server_soak.py"
    command = [
        sys.executable,
        str(script),
        "--seconds",
        "60",
        "--vanishing",
        "300",
        "--queued",
        "1000",
        "--allowed-growth",
        "128",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 + 2 * PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_embedded_model_answers_many_clients_as_it_answers_offline(smollm2_path: Path) -> None:
    questions = ["What is the capital of France?", "Name a colour.", "Write a haiku.", "Count to five."]
    conversations = [[{"role": "user", "content": question}] for question in questions]
    options = {"max_model_len": 512, "max_num_seqs": 8}
    with LLM(str(smollm2_path), dtype="float32", **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12)
        expected = [output.outputs[0].text for output in llm.chat(conversations, params, use_tqdm=False)]
    assert "Paris" in expected[0]
    answers: dict[int, str] = {}
    flags = ("--max-model-len", "512", "--max-num-seqs", "8", "--dtype", "float32")
    with (
        ServerProcess(smollm2_path, *flags, dummy=False) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0, timeout=PATIENCE) as client,
    ):

        def ask(index: int) -> None:
            stream = client.chat.completions.create(
                model="tested", messages=conversations[index], temperature=0, max_tokens=12, stream=True
            )
            answers[index] = "".join(chunk.choices[0].delta.content or "" for chunk in stream)

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(questions))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    assert [answers[index] for index in range(len(questions))] == expected
