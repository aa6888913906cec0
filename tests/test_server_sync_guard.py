"""A server that watches itself for hidden syncs: it counts them in /metrics and names the line in its log."""

from __future__ import annotations

from pathlib import Path

from stretto.observe import inject
from tests.helpers.server_process import ServerProcess

INNOCENT = "if (tokens_S >= 0).all():"
BODY = {"model": "tested", "prompt": [3, 4, 5], "max_tokens": 8, "ignore_eos": True, "temperature": 0}


def _line() -> int:
    lines = Path(inject.__file__).read_text().splitlines()
    (found,) = [number for number, line in enumerate(lines, 1) if INNOCENT in line]
    return found


def test_hidden_syncs_are_counted_and_named(dummy_model: Path) -> None:
    options = ["--sync-guard", "count", "--inject", "sync@sample", "--inject", "slow-device=1ms"]
    with ServerProcess(dummy_model, *options) as server:
        for _ in range(2):
            status, answer = server.post("/v1/completions", BODY)
            assert (status, answer["usage"]["completion_tokens"]) == (200, 8)
        assert server.metric("hidden_syncs_total") >= 16
        assert server.metric("engine_steps_total") >= 16
        (told,) = [line for line in server.text.splitlines() if "hidden sync:" in line]  # once, not every step
        assert f"inject.py:{_line()} in look_at_samples" in told
        assert "torch.where" in told  # the remedy
