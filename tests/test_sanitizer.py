"""What compute-sanitizer is given to watch names every kernel, and its report sees every kind of failure."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

SCRIPTS = Path(__file__).parents[1] / "scripts"
CLEAN = {
    "memcheck": "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n",
    "racecheck": "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n",
}


def test_every_kernel_is_called() -> None:
    """Launches are counted, not run: that is what the kernels' own tests are for."""
    script = runpy.run_path(str(SCRIPTS / "sanitize_kernels.py"))
    with script["launches_watched"](execute=False) as seen:
        script["call_all"]()
    assert len(seen) > 20
    assert seen == script["all_kernels"]().keys()


def report_of(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    logs: dict[str, str],
    status: int = 0,
    out: str = "1 kernels: _gemv\n",
) -> tuple[Any, Any]:
    """(exit status, the report) of runs that left these logs."""
    (directory / "version").write_text("2025.3\n")
    for tool, text in logs.items():
        (directory / f"{tool}.log").write_text(text)
        (directory / f"{tool}.out").write_text(out)
        (directory / f"{tool}.status").write_text(f"{status} 7\n")
    target = directory / "report.json"
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    monkeypatch.setattr(sys, "argv", ["sanitizer_report.py", str(target), str(directory), *logs])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(SCRIPTS / "sanitizer_report.py"), run_name="__main__")
    return exit_.value.code, json.loads(target.read_text())


def test_a_clean_run_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, report = report_of(tmp_path, monkeypatch, CLEAN)
    assert status == 0
    assert {tool: run["errors"] for tool, run in report["tools"].items()} == {"memcheck": 0, "racecheck": 0}
    assert report["tools"]["memcheck"]["kernels"] == ["_gemv"]
    assert report["compute_sanitizer"] == "2025.3"


@pytest.mark.parametrize(
    ("logs", "status", "out"),
    [
        ({**CLEAN, "memcheck": CLEAN["memcheck"].replace("0 errors", "2 errors")}, 99, "1 kernels: _gemv\n"),
        ({**CLEAN, "racecheck": CLEAN["racecheck"].replace("0 hazards", "3 hazards")}, 0, "1 kernels: _gemv\n"),
        ({**CLEAN, "racecheck": "killed"}, 0, "1 kernels: _gemv\n"),
        (CLEAN, 1, "1 kernels: _gemv\n"),
        (CLEAN, 0, "Traceback\n"),
    ],
    ids=["errors", "hazards", "no summary", "failed", "did not finish"],
)
def test_what_is_not_clean_fails(
    logs: dict[str, str], status: int, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert report_of(tmp_path, monkeypatch, logs, status, out)[0]
