"""How long a user waits before the first token: `stretto --help`, the imports, and the embedded model in each format.

Each is a process of its own, several times over; medians and the resident memory once the engine is ready.

    python benchmarks/start_up.py [--rounds 5] [--json benchmarks/results/start_up.json]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from stretto.bench.throughput import describe_device, versions

FORMATS = ("auto", "float32", "bfloat16", "int4")
_START = """
import json, sys, time
begin = time.perf_counter()
import transformers
from stretto import LLM
imported = time.perf_counter()
with LLM("smollm2-135m", dtype=sys.argv[1]) as llm:
    ready = time.perf_counter()
    resident = [line for line in open("/proc/self/status") if line.startswith("VmRSS")]
print(json.dumps([imported - begin, ready - imported, int(resident[0].split()[1]) / 1024]))
"""


def help_s() -> float:
    """Wall seconds of `stretto --help`."""
    begin = time.perf_counter()
    subprocess.run([Path(sys.executable).parent / "stretto", "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def start(dtype: str) -> tuple[float, float, float]:
    """Seconds of the imports, seconds of `LLM(...)`, MiB of resident memory afterwards."""
    out = subprocess.run([sys.executable, "-c", _START, dtype], check=True, capture_output=True, text=True).stdout
    imports_s, load_s, resident_mib = json.loads(out.splitlines()[-1])
    return imports_s, load_s, resident_mib


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    start("auto")  # fetches the model, fills the file cache
    report: dict[str, object] = {"versions": versions(), "device": describe_device("cpu")}
    report["help_s"] = median(help_s() for _ in range(options.rounds))
    print(f"stretto --help: {report['help_s']:.2f} s")
    formats = {}
    for dtype in FORMATS:
        runs = [start(dtype) for _ in range(options.rounds)]
        imports_s, load_s, resident_mib = (median(column) for column in zip(*runs, strict=True))
        formats[dtype] = {"imports_s": imports_s, "load_s": load_s, "resident_mib": resident_mib, "runs": runs}
        print(
            f"{dtype}: imports {imports_s:.2f} s, LLM(...) {load_s:.2f} s, {resident_mib:.0f} MiB resident", flush=True
        )
    report["formats"] = formats
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
