"""What compute-sanitizer is given to watch names every kernel, and its report sees every kind of failure."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
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
FOUND = {
    "memcheck": "========= Invalid __global__ write\n========= ERROR SUMMARY: 2 errors\n",
    "racecheck": "========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)\n",
}
PRINTED = '{"kernels": {"_%s": [2, 0.1]}}\n'
CASES = ("rows", "heads")


def test_every_kernel_is_called() -> None:
    """Launches are counted, not run: that is what the kernels' own tests are for."""
    script = runpy.run_path(str(SCRIPTS / "sanitize_kernels.py"))
    with script["launches_watched"](execute=False) as seen:
        for case in script["CASES"].values():
            case()
    assert len(seen) > 20
    assert seen.keys() == script["all_kernels"]().keys()


class Logs:
    """A folder of logs as gpu_sanitize.sh leaves them: all clean, but the control's fault found."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        about = {"gpu": "a GPU", "kernels": [f"_{case}" for case in CASES], "cases": list(CASES)}
        (directory / "about.json").write_text(json.dumps(about))
        (directory / "version").write_text("2025.3\n")
        (directory / "tools").write_text("\n".join(CLEAN))
        for tool in CLEAN:
            self.put(tool, "control", FOUND[tool], status=99, out="")
            for case in CASES:
                self.put(tool, case, CLEAN[tool])

    def put(self, tool: str, case: str, log: str, status: int = 0, out: str | None = None) -> None:
        """What a tool left of a case."""
        path = self.directory / f"{tool}.{case}"
        path.with_name(f"{path.name}.log").write_text(log)
        path.with_name(f"{path.name}.out").write_text(PRINTED % case if out is None else out)
        path.with_name(f"{path.name}.status").write_text(f"{status} 7\n")

    def report(self, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, Any]]:
        """(exit status, the report)."""
        target = self.directory / "report.json"
        monkeypatch.setattr(sys, "argv", ["sanitizer_report.py", str(target), str(self.directory)])
        with pytest.raises(SystemExit) as exit_:
            runpy.run_path(str(SCRIPTS / "sanitizer_report.py"), run_name="__main__")
        return exit_.value.code, json.loads(target.read_text())


def test_a_clean_run_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, report = Logs(tmp_path).report(monkeypatch)
    assert status == 0
    assert report["gpu"] == "a GPU"
    assert report["compute_sanitizer"] == "2025.3"
    for run in report["tools"].values():
        assert (run["complete"], run["clean"], run["control_found"]) == (True, True, True)
        assert run["clean_kernels"] == ["_heads", "_rows"]
        assert run["other_kernels"] == run["cases_not_done"] == []


@pytest.mark.parametrize(
    "left",
    [
        {"log": FOUND["racecheck"], "status": 99},
        {"log": FOUND["racecheck"]},
        {"log": "killed"},
        {"log": CLEAN["racecheck"], "status": 1},
        {"log": CLEAN["racecheck"], "out": "Traceback\n"},
    ],
    ids=["hazards", "hazards untold", "no summary", "failed", "did not finish"],
)
def test_what_is_not_clean_fails_and_keeps_its_log(
    left: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = Logs(tmp_path)
    logs.put("racecheck", "rows", **left)
    status, report = logs.report(monkeypatch)
    assert status
    run = report["tools"]["racecheck"]
    assert (run["complete"], run["clean"]) == (True, False)
    assert run["clean_kernels"] == ["_heads"]
    assert run["other_kernels"] == ["_rows"]
    assert run["cases"]["rows"]["log"] == left["log"].splitlines()
    assert report["tools"]["memcheck"]["clean"]


def test_a_kernel_with_a_finding_in_one_case_is_not_clean_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = Logs(tmp_path)
    logs.put("memcheck", "rows", FOUND["memcheck"], status=99, out=PRINTED % "heads")
    assert logs.report(monkeypatch)[1]["tools"]["memcheck"]["clean_kernels"] == []


def test_a_run_cut_short_tells_what_was_not_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = Logs(tmp_path)
    (tmp_path / "racecheck.heads.status").unlink()
    (tmp_path / "racecheck.control.status").write_text("")  # just being written
    status, report = logs.report(monkeypatch)
    assert status
    run = report["tools"]["racecheck"]
    assert (run["complete"], run["clean"], run["control_found"]) == (False, False, False)
    assert run["cases_not_done"] == ["heads"]
    assert run["other_kernels"] == ["_heads"]
    assert report["tools"]["memcheck"]["complete"]


def test_a_tool_that_misses_the_fault_of_the_control_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = Logs(tmp_path)
    logs.put("memcheck", "control", CLEAN["memcheck"])
    status, report = logs.report(monkeypatch)
    assert status
    assert not report["tools"]["memcheck"]["clean"]


SANITIZER = """#!/usr/bin/env bash
[ "$1" = --version ] && { echo 2025.3; exit; }
while [ "$1" != "$PYTHON" ]; do [ "$1" = --tool ] && tool=$2; [ "$1" = --log-file ] && log=$2; shift; done
[ "${@: -1}" = control ] && { echo "========= ERROR SUMMARY: 1 errors" > "$log"; exit 99; }
"$@" && echo "========= ERROR SUMMARY: 0 errors" > "$log"
"""
PYTHON = f"""#!/usr/bin/env bash
[ "$1" = scripts/sanitize_kernels.py ] || exec {sys.executable} "$@"
[ $# = 2 ] && echo '{{"kernels": {{"_'$2'": [1, 0.1]}}}}' && exit
echo '{{"kernels": ["_rows", "_heads"], "cases": ["rows", "heads"]}}'
"""


def test_the_script_lets_every_tool_watch_every_case(tmp_path: Path) -> None:
    for name, text in (("sanitizer", SANITIZER), ("python", PYTHON)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    where = {"PYTHON": "python", "COMPUTE_SANITIZER": "sanitizer", "SANITIZER_REPORT": "report.json"}
    environment = {**os.environ, **{name: str(tmp_path / value) for name, value in where.items()}, "JOBS": "3"}
    ran = subprocess.run(
        [SCRIPTS / "gpu_sanitize.sh"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert {tool: run["clean_kernels"] for tool, run in report["tools"].items()} == {
        "racecheck": ["_heads", "_rows"],
        "memcheck": ["_heads", "_rows"],
    }
