"""Turns compute-sanitizer's logs into the small JSON that is kept: `sanitizer_report.py REPORT LOGS TOOL...`.

Ends with an error if a tool found something, did not come to its end, or left no summary.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

_SUMMARY = re.compile(r"(?:ERROR|RACECHECK|INITCHECK|SYNCCHECK) SUMMARY: (\d+)")


def found(logs: Path, tool: str) -> dict[str, object]:
    """What a tool said of its run; `errors` is None if it left no summary."""
    log, out = (logs / f"{tool}.{kind}" for kind in ("log", "out"))
    text = log.read_text() if log.exists() else ""
    status, seconds = map(int, (logs / f"{tool}.status").read_text().split())
    counts = [int(count) for count in _SUMMARY.findall(text)]
    kernels = re.findall(r"^\d+ kernels: (.*)$", out.read_text(), flags=re.MULTILINE)
    return {
        "errors": max(counts) if counts else None,
        "exit_status": status,
        "seconds": seconds,
        "kernels": kernels[-1].split(", ") if kernels else [],
        "first_lines": [line for line in text.splitlines() if not line.startswith("========= COMPUTE")][:40],
    }


def main() -> None:
    """Command line."""
    import torch
    import triton

    report, logs, tools = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    runs = {tool: found(logs, tool) for tool in tools}
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "compute_sanitizer": (logs / "version").read_text().strip(),
        "tools": runs,
    }
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(json.dumps(result, indent=1) + "\n")
    clean = all(run["errors"] == 0 and run["exit_status"] == 0 and run["kernels"] for run in runs.values())
    print(", ".join(f"{tool}: {run['errors']} errors in {run['seconds']} s" for tool, run in runs.items()))
    sys.exit(0 if clean else "compute-sanitizer found something, or did not finish: see the report")


if __name__ == "__main__":
    main()
