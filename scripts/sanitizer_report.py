"""Turns compute-sanitizer's logs so far into the small JSON that is kept: `sanitizer_report.py REPORT LOGS`.

Ends with an error unless every tool has watched every case to its end and found nothing but the fault of the control.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

CONTROL = "control"
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK|INITCHECK|SYNCCHECK) SUMMARY: (\d+)")
Run = dict[str, Any]


def watched(logs: Path, tool: str, case: str) -> Run | None:
    """What a tool said of a case, None if it is not done; `errors` is None if the tool left no summary."""
    log, out, status = (logs / f"{tool}.{case}.{kind}" for kind in ("log", "out", "status"))
    if not status.exists() or not status.read_text().endswith("\n"):
        return None
    code, seconds = map(int, status.read_text().split())
    text = log.read_text(errors="replace") if log.exists() else ""
    counts = [int(count) for count in _SUMMARY.findall(text)]
    printed = out.read_text(errors="replace").splitlines() if out.exists() else []
    kernels = [json.loads(line)["kernels"] for line in printed if line.startswith('{"kernels"')]
    run: Run = {
        "errors": max(counts) if counts else None,
        "exit_status": code,
        "seconds": seconds,
        "kernels": kernels[-1] if kernels else None,
    }
    if not is_clean(run):
        run["log"] = [line for line in text.splitlines() if not line.startswith("========= COMPUTE")][:40]
        run["output"] = printed[-10:]
    return run


def is_clean(run: Run) -> bool:
    """Whether it came to its end and nothing was found."""
    return run["errors"] == 0 and run["exit_status"] == 0 and run["kernels"] is not None


def of_tool(logs: Path, tool: str, cases: list[str], kernels: list[str]) -> Run:
    """What a tool has watched so far: `complete` if that is everything, `clean` if it found nothing there."""
    runs = {case: run for case in cases if (run := watched(logs, tool, case)) is not None}
    control = watched(logs, tool, CONTROL)
    control_found = control is not None and bool(control["errors"])
    launched: dict[bool, set[str]] = {True: set(), False: set()}
    for run in runs.values():
        launched[is_clean(run)].update(run["kernels"] or ())
    clean = launched[True] - launched[False]
    return {
        "complete": len(runs) == len(cases) and control is not None,
        "clean": control_found and all(map(is_clean, runs.values())),
        "control_found": control_found,
        "clean_kernels": sorted(clean),
        "other_kernels": sorted(set(kernels) - clean),
        "cases_not_done": [case for case in cases if case not in runs],
        "cases": runs,
    }


def told(tool: str, of: Run) -> str:
    """A line for the terminal."""
    num_kernels = len(of["clean_kernels"]) + len(of["other_kernels"])
    unclean = [case for case, run in of["cases"].items() if not is_clean(run)]
    return (
        f"{tool}: {len(of['clean_kernels'])} of {num_kernels} kernels clean"
        + (f"; found something or failed: {', '.join(unclean)}" if unclean else "")
        + (f"; not done: {', '.join(of['cases_not_done'])}" if of["cases_not_done"] else "")
        + ("" if of["control_found"] else "; the fault of the control not found")
    )


def main() -> None:
    """Command line."""
    report, logs = map(Path, sys.argv[1:])
    about = json.loads((logs / "about.json").read_text())
    cases, kernels = about.pop("cases"), about.pop("kernels")
    tools = {tool: of_tool(logs, tool, cases, kernels) for tool in (logs / "tools").read_text().split()}
    result = {**about, "compute_sanitizer": (logs / "version").read_text().strip(), "tools": tools}
    report.parent.mkdir(parents=True, exist_ok=True)
    written = report.with_suffix(".new")
    written.write_text(json.dumps(result, indent=1) + "\n")
    written.replace(report)  # at any moment there is a whole one
    print(*(told(tool, of) for tool, of in tools.items()), sep="\n")
    sys.exit(0 if all(of["complete"] and of["clean"] and not of["other_kernels"] for of in tools.values()) else 1)


if __name__ == "__main__":
    main()
