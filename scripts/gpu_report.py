"""Turns the lines of finished GPU tests into the small JSON that is kept: what passed, where, and what did not run.

`gpu_report.py --about` prints date, GPU, driver and versions. `gpu_report.py REPORT FOLDER` reads `about.json` and
`*.jsonl` of the folder (`finished_tests.py` writes them) and ends with an error unless all has run and nothing failed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

GOOD = {"passed", "skipped", "xfailed"}
NUM_SLOWEST = 200
NUM_PRINTED = 15


def about() -> dict[str, object]:
    """Of this machine."""
    import torch
    import triton

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    drivers = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}",
        "driver": drivers[0] if drivers else "unknown",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }


def lines_of(path: Path) -> Iterable[dict[str, Any]]:
    """Its lines; the last may be half written."""
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def summary(sources: list[Path]) -> dict[str, Any]:
    """What the lines of some runs say together. A run without a list of its tests has not begun."""
    planned: dict[str, None] = {}
    finished: dict[str, dict[str, Any]] = {}
    not_begun = []
    for source in sources:
        began = False
        for line in lines_of(source):
            if "planned" in line:
                began = True
                planned.update(dict.fromkeys(line["planned"]))
            else:
                finished[line["test"]] = line
        if not began:
            not_begun.append(source.stem)
    not_run = [test for test in planned if test not in finished]
    files: dict[str, Counter[str]] = {}
    seconds: Counter[str] = Counter()
    for test, line in finished.items():
        files.setdefault(_file(test), Counter())[line["outcome"]] += 1
        seconds[_file(test)] += line["seconds"]
    slowest = sorted(finished, key=lambda test: -finished[test]["seconds"])[:NUM_SLOWEST]
    return {
        "complete": not not_begun and not not_run,
        "total": dict(sum(files.values(), Counter())),
        "files": {name: {**counts, "seconds": round(seconds[name], 1)} for name, counts in sorted(files.items())},
        "wrong": [line for line in finished.values() if line["outcome"] not in GOOD],
        "runs_not_begun": not_begun,
        "not_run": not_run,
        "slowest": [(test, finished[test]["seconds"]) for test in slowest],
    }


def _file(test: str) -> str:
    return test.partition("::")[0]


def told(report: dict[str, Any]) -> Iterable[str]:
    """Lines for the terminal, the total last."""
    for name, counts in report["files"].items():
        yield f"{counts['seconds']:8.1f} s  {name}: " + ", ".join(
            f"{n} {k}" for k, n in counts.items() if k != "seconds"
        )
    yield "slowest:"
    for test, seconds in report["slowest"][:NUM_PRINTED]:
        yield f"{seconds:8.1f} s  {test}"
    for line in report["wrong"]:
        yield f"{line['outcome'].upper()} {line['test']}: {line.get('why', '')}"
    for run in report["runs_not_begun"]:
        yield f"NOT BEGUN {run}"
    missing = Counter(_file(test) for test in report["not_run"])
    for name, count in missing.items():
        yield f"NOT RUN {count} of {name}"
    yield json.dumps(report["total"]) + ("" if report["complete"] else " and not complete")


def main() -> None:
    """Command line."""
    if sys.argv[1:] == ["--about"]:
        print(json.dumps(about()))
        return
    target, folder = map(Path, sys.argv[1:])
    report = {**json.loads((folder / "about.json").read_text()), **summary(sorted(folder.glob("*.jsonl")))}
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(report, indent=1) + "\n")
    print(*told(report), sep="\n")
    sys.exit(0 if report["complete"] and not report["wrong"] else 1)


if __name__ == "__main__":
    main()
