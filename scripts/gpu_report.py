"""Turns JUnit files of the GPU tests into the small JSON that is kept: counts, date, GPU, driver, versions."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import torch
import triton


def main() -> None:
    """gpu_report.py REPORT JUNIT..."""
    target, *sources = map(Path, sys.argv[1:])
    files: dict[str, Counter[str]] = {}
    cases = (case for source in sources for case in ElementTree.parse(source).getroot().iter("testcase"))
    for case in cases:
        outcome = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        files.setdefault(case.get("classname", "?").split(".Test")[0], Counter())[outcome] += 1
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "total": dict(sum(files.values(), Counter())),
        "files": {name: dict(counts) for name, counts in sorted(files.items())},
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["total"]))


if __name__ == "__main__":
    main()
