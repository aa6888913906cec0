"""The command line: what it prints, where, and with which exit code."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stretto import __version__
from stretto.cli import main
from tests.helpers.dummy_model import write_dummy_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = write_dummy_model(tmp_path_factory.mktemp("model"))
    return ["--model", str(directory), "--load-format", "dummy", "--dtype", "float32", "--max-model-len", "512"]


class Result:
    """What a command left behind."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def stretto(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command in this process, without a terminal."""

    def run(*arguments: str, stdin: str | bytes = "") -> Result:
        monkeypatch.setattr(sys, "argv", ["stretto", *arguments])
        data = stdin if isinstance(stdin, bytes) else stdin.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return Result(exit_.value.code if isinstance(exit_.value.code, int) else 0, captured.out, captured.err)

    return run


def test_help_needs_neither_torch_nor_numpy() -> None:
    code = "import sys; from stretto.cli import main\ntry: main()\nfinally: print(sorted(sys.modules), file=sys.stderr)"
    for arguments in (["--help"], ["generate", "--help"], ["bench", "throughput", "--help"], ["--version"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        assert done.stdout
        assert not {"torch", "numpy", "transformers", "tokenizers"} & set(done.stderr.split("'"))


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "stretto", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"stretto {__version__}\n"


def test_help_lists_the_commands_and_their_options(stretto: Any) -> None:
    assert all(command in stretto("--help").out for command in ("generate", "chat", "bench"))
    for option in ("--max-tokens", "--temperature", "--stop", "--json", "--overlap-depth", "--dtype"):
        assert option in stretto("generate", "--help").out


def test_one_answer_is_printed_as_it_is(stretto: Any, model: list[str]) -> None:
    result = stretto("generate", "the fox", "--max-tokens", "20", *model)
    expected = json.loads(stretto("generate", "the fox", "--max-tokens", "20", "--json", *model).out)
    assert result.code == 0
    assert result.out == expected["outputs"][0]["text"] + "\n"
    assert len(expected["outputs"][0]["token_ids"]) == 20


def test_several_answers_are_printed_in_order_with_their_prompts(stretto: Any, model: list[str]) -> None:
    arguments = ["generate", "the fox", "a fugue", "-n", "2", "--temperature", "1", "--seed", "4", "--max-tokens", "30"]
    lines = stretto(*arguments, "--json", *model).out.split("\n")
    expected = [json.loads(line) for line in lines if line]
    assert [output["prompt"] for output in expected] == ["the fox", "a fugue"]
    blocks = [
        f"[{i + 1}.{j + 1}] {output['prompt']}\n{sample['text']}\n"
        for i, output in enumerate(expected)
        for j, sample in enumerate(output["outputs"])
    ]
    assert stretto(*arguments, *model).out == "\n".join(blocks)


def test_prompts_come_from_arguments_a_file_or_standard_input(stretto: Any, model: list[str], tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("the fox\n\na fugue\n", encoding="utf-8")
    tail = ["--max-tokens", "5", "--json", *model]
    from_arguments = stretto("generate", "the fox", "a fugue", *tail).out
    assert stretto("generate", "--file", str(tmp_path / "prompts.txt"), *tail).out == from_arguments
    assert stretto("generate", "--file", "-", *tail, stdin="the fox\na fugue\n").out == from_arguments
    whole = json.loads(stretto("generate", *tail, stdin="the fox\na fugue\n").out)
    assert whole["prompt"] == "the fox\na fugue"


def test_options_reach_the_sampler(stretto: Any, model: list[str]) -> None:
    common = ["generate", "--chat", "the fox", "--temperature", "1", "--seed", "7", "--json", *model]
    full = json.loads(stretto(*common, "--max-tokens", "60").out)
    assert full["prompt"] == "<|user|>the fox\n<|assistant|>"
    text = full["outputs"][0]["text"]
    sample = json.loads(stretto(*common, "--max-tokens", "60", "--stop", text[8:12], "--logprobs", "2").out)["outputs"][
        0
    ]
    assert sample["stop_reason"] == text[8:12]
    assert sample["text"] == text[: text.index(text[8:12])]
    assert len(sample["logprobs"]) == len(sample["token_ids"])


def test_stats_is_one_line_of_figures(stretto: Any, model: list[str]) -> None:
    result = stretto(
        "generate", "the fox", "--max-tokens", "9", "--ignore-eos", "--stats", "--overlap-depth", "2", *model
    )
    last = result.err.strip().split("\n")[-1]
    assert last.startswith("9 tokens in ")
    assert all(part in last for part in ("tokens/s", "9 steps", "bubble share", "launching share", "overlap depth 2"))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate", "x", "--temperature", "-1"], 2, "temperature is -1.0; allowed"),
        (["generate", "x", "--max-tokens", "0"], 2, "max_tokens is 0; allowed"),
        (["generate", "x", "--dtype", "float8"], 2, "dtype is 'float8'; allowed"),
        (["generate", "x", "--file", "y"], 2, "prompts and --file both given"),
        (["generate", "x", "--logprobs", "1"], 2, "--logprobs needs --json"),
        (["generate"], 2, "standard input has no text"),
        (["generate", "x", "--no-such-option"], 2, "No such option"),
        (["generate", "x", "--top-k", "many"], 2, "--top-k"),
        (["no-such-command"], 2, "No such command"),
        (["trace", "record", "--", "generate", "x", "--no-such-option"], 2, "No such option: --no-such-option"),
        (["trace", "record", "--", "generate", "x", "--top-k", "many"], 2, "generate --help"),
        (["trace", "record", "--", "generate", "x", "--dtype", "float8"], 2, "dtype is 'float8'; allowed"),
        (["generate", "x", "--model", "/no/such/model"], 1, "no such model"),
        (["chat", "--model", "/no/such/model"], 1, "no such model"),
        (["bench", "throughput", "--num-prompts", "0"], 2, "num_prompts is 0"),
        (["generate", "x", "--batch-policy", "any"], 2, "batch_policy is 'any'; allowed: mixed, prefill-first"),
    ],
)
def test_an_error_is_one_line_on_standard_error(stretto: Any, arguments: list[str], code: int, message: str) -> None:
    result = stretto(*arguments)
    errors = [line for line in result.err.split("\n") if line and line not in ("stretto: starting", "stretto: ready")]
    assert (result.code, result.out) == (code, "")
    assert len(errors) == 1
    assert errors[0].startswith("stretto: error: ")
    assert message in errors[0]


FILE_ARGUMENTS = [
    ("generate", "--file"),
    ("bench", "throughput", "--dataset-path"),
    ("bench", "serve", "--trace"),
    ("serve", "--config"),
    ("simulate",),
    ("simulate", "--trace"),
    ("trace", "analyze"),
]


@pytest.mark.parametrize("command", FILE_ARGUMENTS, ids="-".join)
def test_a_file_that_cannot_be_read_is_bad_input_for_every_command(stretto: Any, command: Any, tmp_path: Path) -> None:
    for path in (tmp_path / "missing.json", tmp_path):  # a directory is no file
        result = stretto(*command, str(path))
        assert (result.code, result.out) == (2, "")
        assert len(result.err.strip().split("\n")) == 1
        assert result.err.startswith("stretto: error: ")
        assert str(path) in result.err


@pytest.mark.parametrize("command", FILE_ARGUMENTS[:-1], ids="-".join)
def test_a_file_that_is_not_utf8_is_bad_input(stretto: Any, command: Any, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"the fox\nthe f\xf6x\n")
    result = stretto(*command, str(path))
    assert (result.code, result.out) == (2, "")
    assert str(path) in result.err


def test_standard_input_that_is_not_utf8_is_told_with_its_place(stretto: Any) -> None:
    for arguments in (["generate"], ["generate", "--file", "-"], ["bench", "throughput", "--dataset-path", "-"]):
        result = stretto(*arguments, stdin=b"the fox\nthe f\xf6x\n")
        assert (result.code, result.out) == (2, "")
        assert "standard input is not UTF-8: byte 0xf6 in line 2" in result.err


def test_standard_input_is_utf8_in_every_locale(model: list[str]) -> None:
    command = [sys.executable, "-m", "stretto", "generate", "--max-tokens", "1", "--json", *model]
    for locale in ("C", "POSIX", "C.UTF-8"):
        environment = os.environ | {"LC_ALL": locale, "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
        done = subprocess.run(command, input=b"\xff", capture_output=True, env=environment, check=False, timeout=100)
        assert done.returncode == 2
        assert b"standard input is not UTF-8: byte 0xff in line 1" in done.stderr


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["stretto", "generate", "x", "--max-tokens", "0", "--debug"])
    with pytest.raises(ValueError, match="max_tokens"):
        main()


def test_a_prompt_that_does_not_fit_is_bad_input(stretto: Any, model: list[str]) -> None:
    result = stretto("generate", "fox " * 600, *model)
    assert result.code == 2
    assert "at most 511 fit" in result.err


def test_bench_throughput_prints_a_table_and_writes_json(stretto: Any, model: list[str], tmp_path: Path) -> None:
    path = tmp_path / "out" / "figures.json"
    sizes = ["--num-prompts", "3", "--input-len", "10", "--output-len", "7"]
    result = stretto("bench", "throughput", *sizes, "--overlap-depth", "0", "--json", str(path), *model)
    assert result.code == 0
    figures = json.loads(path.read_text())
    expected = {"num_prompts": 3, "input_tokens": 30, "output_tokens": 21, "steps": 7, "overlap_depth": 0}
    assert {key: figures[key] for key in expected} == expected
    assert figures["output_tokens_per_s"] == pytest.approx(21 / figures["seconds"])
    assert 0.0 <= figures["bubble_share"] < 1.0
    assert figures["dtype"] == "float32"
    assert set(figures["versions"]) == {"stretto", "torch", "python"}
    for row in ("output tokens", "tokens/s", "steps", "bubble share", "launching share"):
        assert row in result.out


def test_bench_throughput_takes_given_prompts(stretto: Any, model: list[str], tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("the fox\nthe\n", encoding="utf-8")
    sizes = ["--dataset-path", str(tmp_path / "prompts.txt"), "--num-prompts", "3", "--output-len", "2"]
    path = tmp_path / "figures.json"
    assert stretto("bench", "throughput", *sizes, "--json", str(path), *model).code == 0
    assert json.loads(path.read_text())["output_tokens"] == 6
    too_long = stretto("bench", "throughput", "--input-len", "500", "--output-len", "13", *model)
    assert (too_long.code, "more than the context length of 512" in too_long.err) == (2, True)


def test_chat_reads_messages_line_by_line_without_a_terminal(stretto: Any, model: list[str]) -> None:
    tail = ["--max-tokens", "12", "--temperature", "0", *model]
    result = stretto("chat", *tail, stdin="the fox\n\n/help\n/wrong\na fugue\n/reset\nthe fox\n/quit\nnever read\n")
    assert result.code == 0
    first = json.loads(stretto("generate", "--chat", "the fox", "--json", *tail).out)["outputs"][0]["text"]
    assert result.out.startswith(first + "\n")
    assert result.out.count(first + "\n") == 2  # and again after /reset
    assert "/quit" in result.out
    for note in ("no command /wrong", "conversation forgotten", "length limit"):
        assert note in result.err


def test_chat_answers_what_comes_before_a_line_that_is_not_utf8_and_ends_there(stretto: Any, model: list[str]) -> None:
    tail = ["--max-tokens", "12", "--temperature", "0", *model]
    result = stretto("chat", *tail, stdin=b"the fox\n\nthe f\xf6x\nthe fox\n")
    assert result.code == 2
    told = "stretto: error: standard input is not UTF-8: byte 0xf6 in line 3; convert it to UTF-8"
    assert result.err.splitlines()[-1] == told
    assert result.out == stretto("chat", *tail, stdin="the fox\n").out


def test_chat_remembers_the_conversation_and_forgets_its_oldest_turns(stretto: Any, model: list[str]) -> None:
    tail = ["--max-tokens", "100", "--temperature", "0", *model]
    result = stretto("chat", *tail, stdin="".join(f"the quick brown fox {i}\n" for i in range(6)))
    assert result.code == 0
    assert "the oldest turn is forgotten" in result.err
    too_long = stretto("chat", *tail, stdin="fox " * 600 + "\nthe fox\n")
    assert "at most 511 fit" in too_long.err
    assert too_long.code == 0
    assert too_long.out.strip()
