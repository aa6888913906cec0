"""The run of the GPU tests leaves its results as they come, and its report says what did not run; on tests made up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MARK = ".".join(("mark", "gpu"))
PLUGIN = (
    *("-p", "xdist", "-p", "scripts.finished_tests", "--noconftest"),
    *("-p", "no:cacheprovider", "-o", "addopts=--strict-markers"),
)
MIXED = """
import os, pytest
@pytest.mark.parametrize("number", range(4))
def test_passes(number): pass
def test_fails(): assert 1 == 2
@pytest.mark.skip
def test_skipped(): pass
@pytest.mark.xfail
def test_expected(): assert 0
@pytest.fixture
def broken(): raise OSError("no fixture")
def test_error(broken): pass
@pytest.fixture
def ends_badly():
    yield
    raise OSError("no end")
def test_ends_badly(ends_badly): pass
"""
OUTCOMES = {"passed": 4, "failed": 1, "skipped": 1, "xfailed": 1, "error": 2}


def command(folder: Path, *options: str) -> list[str]:
    lines = str(folder / "together.jsonl")
    return [sys.executable, "-m", "pytest", "-q", *PLUGIN, "--rootdir", str(folder), "--finished", lines, *options]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def run_pytest(folder: Path, *options: str) -> None:
    subprocess.run(
        command(folder, *options), env=environment(), cwd=folder, capture_output=True, timeout=60, check=False
    )


def report_of(folder: Path) -> tuple[int, dict[str, Any], str]:
    """(exit status, report, what was printed)."""
    (folder / "about.json").write_text(json.dumps({"gpu": "1 x a GPU"}))
    target = folder / "report.json"
    told = subprocess.run(
        [sys.executable, ROOT / "scripts" / "gpu_report.py", target, folder],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return told.returncode, json.loads(target.read_text()), told.stdout


@pytest.mark.parametrize("workers", ["0", "2"])
def test_every_outcome_is_reported(tmp_path: Path, workers: str) -> None:
    (tmp_path / "test_mixed.py").write_text(MIXED)
    (tmp_path / "test_unreadable.py").write_text("import nothing_of_this_name")
    if workers != "0":  # the death of a worker is its test's failure
        (tmp_path / "test_dies.py").write_text("import os\ndef test_dies(): os._exit(3)\n")
    run_pytest(tmp_path, "-n", workers, "--continue-on-collection-errors")
    status, report, told = report_of(tmp_path)
    assert status == 1
    assert report["complete"]
    assert report["gpu"] == "1 x a GPU"
    mixed = {outcome: count for outcome, count in report["files"]["test_mixed.py"].items() if outcome != "seconds"}
    assert mixed == OUTCOMES
    assert report["total"] == {**OUTCOMES, "error": 3, "failed": 1 if workers == "0" else 2}
    wrong = {line["test"]: line["why"] for line in report["wrong"]}
    assert "assert 1 == 2" in wrong["test_mixed.py::test_fails"]
    assert "no fixture" in wrong["test_mixed.py::test_error"]
    assert "nothing_of_this_name" in wrong["test_unreadable.py"]
    assert workers == "0" or "crashed" in wrong["test_dies.py::test_dies"]
    assert "FAILED test_mixed.py::test_fails" in told


def test_a_run_that_was_killed_tells_what_ran_and_what_did_not(tmp_path: Path) -> None:
    (tmp_path / "test_long.py").write_text(
        "import pytest, time\n@pytest.mark.parametrize('s', [0, 0, 0, 60, 0])\ndef test_sleeps(s): time.sleep(s)\n"
    )
    (tmp_path / "alone.jsonl").touch()
    with subprocess.Popen(
        command(tmp_path, "-n", "1"), env=environment(), cwd=tmp_path, stdout=subprocess.DEVNULL, start_new_session=True
    ) as process:
        lines, deadline = tmp_path / "together.jsonl", time.monotonic() + 30
        while (not lines.exists() or lines.read_text().count("\n") < 4) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    with lines.open("a") as file:
        file.write('{"test": "test_long.py::half')
    status, report, told = report_of(tmp_path)
    assert status == 1
    assert not report["complete"]
    assert report["total"] == {"passed": 3}
    assert report["not_run"] == ["test_long.py::test_sleeps[60]", "test_long.py::test_sleeps[0_3]"]
    assert report["runs_not_begun"] == ["alone"]
    assert "NOT RUN 2 of test_long.py" in told


def test_the_slowest_of_an_earlier_run_come_first(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "def test_a(): pass\ndef test_b(): pass\ndef test_prefill(): pass\ndef test_c(): pass\n"
    )
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps({"slowest": [["test_some.py::test_c", 9.0], ["test_some.py::test_b", 3.0]]}))
    run_pytest(tmp_path, "--slow-first", str(earlier))
    planned = json.loads((tmp_path / "together.jsonl").read_text().splitlines()[0])["planned"]
    assert [test.partition("::")[2] for test in planned] == ["test_c", "test_b", "test_prefill", "test_a"]


def test_workers_share_the_gpus(tmp_path: Path) -> None:
    (tmp_path / "test_gpu.py").write_text(
        "import os, pathlib, pytest, time\n@pytest.mark.parametrize('number', range(6))\ndef test_sees(number):\n"
        "    time.sleep(0.1)\n    name = os.environ['PYTEST_XDIST_WORKER'] + os.environ['CUDA_VISIBLE_DEVICES']\n"
        "    pathlib.Path(__file__).with_name(name).touch()\n"
    )
    run_pytest(tmp_path, "-n", "2", "--share-gpus", "4,GPU-7", "--maxschedchunk", "1")
    assert {path.name for path in tmp_path.glob("gw*")} == {"gw04", "gw1GPU-7"}


PYTHON = f"""#!/usr/bin/env bash
# An interpreter that sees two GPUs, and a pytest whose only test passes, unless it is stopped.
case "$1 $2" in
  "-c "*) echo 2 ;;
  "scripts/gpu_report.py --about") echo '{{}}' ;;
  "-m pytest")
    echo "$*" >>"$CALLS"
    while [ "$1" != --finished ]; do shift; done
    echo '{{"planned": ["tests/test_of_'$(basename "$2")'::test"]}}' >>"$2"
    [ -z "$STOPPED" ] || exit 2
    echo '{{"test": "tests/test_of_'$(basename "$2")'::test", "outcome": "passed", "seconds": 1}}' >>"$2" ;;
  *) exec {sys.executable} "$@" ;;
esac
"""


def run_script(folder: Path, *, stopped: str = "", **environ: str) -> tuple[int, dict[str, Any], list[str]]:
    """(exit status, report, the calls of pytest)."""
    (folder / "python").write_text(PYTHON)
    (folder / "python").chmod(0o755)
    where = {"PYTHON": "python", "GPU_TEST_REPORT": "report.json", "CALLS": "calls"}
    given = {**environment(), **{name: str(folder / value) for name, value in where.items()}, "STOPPED": stopped}
    command = [ROOT / "scripts" / "gpu_test.sh", "--noconftest"]
    ran = subprocess.run(command, env={**given, **environ}, capture_output=True, text=True, timeout=60, check=False)
    assert not (folder / "report.json.lines").exists(), ran.stderr
    return ran.returncode, json.loads((folder / "report.json").read_text()), (folder / "calls").read_text().splitlines()


def test_the_script_runs_every_file_once_on_all_gpus(tmp_path: Path) -> None:
    status, report, calls = run_script(tmp_path, CUDA_VISIBLE_DEVICES="2,5", GPU_TEST_WORKERS="9")
    assert (status, report["complete"], report["total"]) == (0, True, {"passed": 4})
    together, alone, large, several = calls
    assert " -n 9 " in together
    assert " --share-gpus 2,5 " in together
    assert " --share-gpus 2,5 tests/gpu/test_overlap_gates_gpu.py tests/gpu/test_memory_gpu.py --noconftest" in alone
    assert " -n 6 --share-gpus 2,5 tests/gpu/test_shapes_gpu.py --noconftest" in large
    assert " -n 6 tests/gpu/test_tp_gpu.py --noconftest" in several
    named = [word for call in calls for word in call.split() if word.startswith("tests/")]
    marked = {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*.py") if MARK in path.read_text()}
    kernels = {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/test_kernels*.py")}
    assert len(named) == len(set(named))
    assert marked | kernels <= set(named)


def test_workers_are_as_many_as_cores_whatever_openmp_may_use(tmp_path: Path) -> None:
    _, _, calls = run_script(tmp_path, OMP_NUM_THREADS="64")
    assert f" -n {min(2 * 14, len(os.sched_getaffinity(0)))} " in calls[0]


def test_a_script_that_was_stopped_reports_and_goes_no_further(tmp_path: Path) -> None:
    status, report, calls = run_script(tmp_path, stopped="yes")
    assert status == 2
    assert len(calls) == 1
    assert (report["complete"], report["runs_not_begun"]) == (False, ["alone", "large", "several"])
    assert report["not_run"] == ["tests/test_of_together.jsonl::test"]
