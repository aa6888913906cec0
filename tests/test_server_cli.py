"""`stretto serve` as an operator sees it: options, the configuration file, the summary."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from stretto.cli import main
from stretto.errors import InvalidRequest
from stretto.server.settings import ServerConfig
from tests.helpers.server_process import ServerProcess


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


Command = Callable[..., Done]


@pytest.fixture
def stretto(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command in this process."""

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["stretto", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return Done(int(exit_.value.code or 0), captured.out, captured.err)

    return run


def test_help_is_grouped_and_has_the_common_names(stretto: Command) -> None:
    text = stretto("serve", "--help").stdout
    for group in ("Model", "Server", "Limits", "Engine", "KV cache", "Overlap", "Configuration file"):
        assert f" {group} " in text
    names = ("--model", "--host", "--port", "--max-model-len", "--max-num-seqs", "--api-key", "--served-model-name")
    for name in (*names, "--tensor-parallel-size", "--config", "--api-workers"):
        assert name in text


def test_help_needs_no_heavy_imports() -> None:
    code = (
        "import sys; sys.argv = ['stretto', 'serve', '--help']\n"
        "from stretto.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'fastapi', 'uvicorn', 'zmq', 'msgspec', 'yaml', 'prometheus_client'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=120)


def test_a_file_gives_options_and_the_command_line_wins(dummy_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        f"model: {dummy_model}\nload-format: dummy\ndtype: float32\nmax_model_len: 256\nmax-num-seqs: 3\n"
        "block_size: 32\nnum-gpu-blocks-override: 41\nprefix-cache: false\nenforce-eager: true\n"
        "inject: slow-host=1us\nsync-guard: count\nbatch-policy: prefill-first\ngpu-memory-utilization: 0.5\n"
        "served-model-name: [one, two]\napi-key: [from-file]\nno-access-log: true\n"
    )
    with ServerProcess(dummy_model, "--config", str(file), "--max-num-seqs", "2") as server:
        headers = {"authorization": "Bearer from-file"}
        assert server.get("/v1/models")[0] == 401
        status, body = server.get("/v1/models", headers)
        assert status == 200
        assert b"tested" in body  # the fixture's command line
        assert b"one" not in body
        assert "context       256 tokens" in server.text
        assert "up to 2 requests" in server.text
        assert "41 pages of 32" in server.text
        assert "/v1/models" not in server.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no-such-option: 1", "no option 'no-such-option'"),
        ("- 1", "must map option names"),
        ("a: [", "no YAML"),
        ("port: many", "port"),
        ("config: other.yaml", "no option 'config'"),
        ("page-size: 16\nblock_size: 32", "'block_size' is given twice"),
        ("batch-policy: any", "batch_policy is 'any'"),
        ("dtype: float8", "dtype is 'float8'"),
        ("enforce-eager: perhaps", "enforce-eager"),
        ("no-access-log: perhaps", "no-access-log"),
        ("no-access-log: true\naccess-log: true", "given twice"),
    ],
)
def test_a_bad_file_is_told(stretto: Command, tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    done = stretto("serve", "--config", str(file))
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--tensor-parallel-size", "0"), "tensor_parallel_size is 0"),
        (("--port", "70000"), "port is 70000"),
        (("--api-workers", "0"), "api_workers is 0"),
        (("--log-level", "loud"), "log_level"),
        (("--config", "/nowhere.yaml"), "cannot be read"),
    ],
)
def test_bad_options_are_told(stretto: Command, options: tuple[str, ...], said: str) -> None:
    done = stretto("serve", *options)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())


def test_a_taken_port_is_told(stretto: Command, server: ServerProcess) -> None:
    done = stretto("serve", "--port", str(server.port))
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1 port {server.port}" in done.stderr


def test_keys_that_no_header_can_carry_are_refused() -> None:
    for key in ("", " x", "ключ"):
        with pytest.raises(InvalidRequest, match="API key"):
            ServerConfig(api_keys=(key,))
    assert "secret" not in repr(ServerConfig(api_keys=("secret",)))
