"""A pytest plugin (`-p scripts.finished_tests`) for long runs that may be cut short: results are on disk as they come.

`--finished FILE` appends a line of JSON with all tests that are to run, and then one for each that has run.
`--slow-first REPORT` begins with the tests that took longest according to an earlier report of `gpu_report.py`.
`--share-gpus 0,1` gives each of xdist's workers one of these GPUs, in turn.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

SLOW = ("prefill",)
"""In the names of tests whose kernels compile longest; for the first time, when there is no earlier report."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The three options."""
    parser.addoption("--finished", type=Path, help="append a line for each finished test")
    parser.addoption("--slow-first", type=Path, help="an earlier report that names the slowest tests")
    parser.addoption("--share-gpus", default="", help="GPUs that xdist's workers share, as in CUDA_VISIBLE_DEVICES")


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Choose the GPU of a worker, before anything can have asked CUDA for one."""
    gpus = [gpu for gpu in early_config.known_args_namespace.share_gpus.split(",") if gpu]
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if gpus and worker:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(worker.removeprefix("gw")) % len(gpus)]


def pytest_configure(config: pytest.Config) -> None:
    """Write down results where all of them arrive: in xdist's controller, or in the only process."""
    target = config.getoption("finished")
    if target is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Finished(target), "finished-tests-lines")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes longest comes first, so that it is not what all wait for in the end; else the order stays."""
    report = config.getoption("slow_first")
    if report is None:
        return
    known = dict(json.loads(report.read_text()).get("slowest", [])) if report.exists() else {}
    items.sort(key=lambda item: (-known.get(item.nodeid, 0.0), not any(part in item.name for part in SLOW)))


class Finished:
    """Writes the lines; each is on disk before the next test is heard of."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._planned: set[str] = set()
        self._seconds: dict[str, float] = {}
        self._outcome: dict[str, dict[str, Any]] = {}

    def _write(self, **line: Any) -> None:
        with self._target.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Without xdist: what is to run."""
        if session.items:
            self._write(planned=[item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """With it, told by each worker."""
        if not self._planned.issuperset(ids):
            self._planned.update(ids)
            self._write(planned=ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be read has no tests to run, and must be heard of nevertheless."""
        if report.failed:
            self._write(test=report.nodeid, outcome="error", seconds=0.0, why=_why(report))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test's set-up, call or tear-down has ended; after the last, or if its process has died, it is finished."""
        test = report.nodeid
        self._seconds[test] = self._seconds.get(test, 0.0) + getattr(report, "duration", 0.0)
        said = self._outcome.setdefault(test, {"outcome": "passed"})
        if report.failed:
            said |= {"outcome": "failed" if report.when in ("call", "???") else "error", "why": _why(report)}
        elif report.skipped:
            said |= {"outcome": "xfailed" if hasattr(report, "wasxfail") else "skipped"}
        if report.when in ("teardown", "???"):
            self._write(test=test, **self._outcome.pop(test), seconds=round(self._seconds.pop(test), 3))


def _why(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The error in short."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash is not None else report.longrepr)[-500:]
