"""The control plane's transports side by side: latency, throughput, and what they cost, with 2, 4 and 8 ranks.

For each transport, number of ranks, and message size, idle and under load (as many processes that burn a core as there
are cores): the time until the last rank has a message (p50, p99), the time that publishing takes the leader, a round
trip, throughput, and processor time per message; and what a rank that waits costs.

    python benchmarks/control_plane.py --quick                 # under 3 minutes
    python benchmarks/control_plane.py                         # about 12 minutes
    python benchmarks/control_plane.py --engine                # also a real engine of three ranks on each transport

Writes benchmarks/results/control_plane.json, docs/images/control-plane.svg, and the tables of docs/control-plane.md
(only with the default places). Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from control_plane_bells import measure_bells
from control_plane_page import fill
from control_plane_plot import as_svg
from control_plane_rank import Plan, burn, fork, run_follower, run_leader

ROOT = Path(__file__).parent.parent
RESULTS, PLOT = ROOT / "benchmarks/results/control_plane.json", ROOT / "docs/images/control-plane.svg"
PAGE = ROOT / "docs/control-plane.md"
TRANSPORTS = {
    "shared memory": ("shared_memory", None),
    "zeromq, ipc": ("zeromq", None),
    "zeromq, tcp": ("zeromq", "127.0.0.1"),
    "gloo": ("gloo", None),
}
RANKS = (2, 4, 8)
SIZES = (0, 64, 1024, 16 * 1024, 128 * 1024, 1024 * 1024)
HANGS_S = 180.0


def measure(name: str, plan: Plan) -> list[dict[str, Any]]:
    """All rows of one transport with one number of ranks."""
    with tempfile.TemporaryDirectory(prefix="stretto-bench-") as made:
        directory = Path(made)
        ours, leaders = socket.socketpair()
        ours.settimeout(HANGS_S)
        ranks = [fork(run_leader, plan, directory, leaders)]
        burners: list[int] = []
        try:
            with ours.makefile() as lines:
                address = json.loads(lines.readline())["address"]
                ranks += [fork(run_follower, plan, rank, address, directory) for rank in range(1, plan.size)]
                for _ in (False, True):
                    if json.loads(lines.readline())["load"]:
                        burners += [fork(burn) for _ in range(os.cpu_count() or 1)]
                    ours.sendall(b"1")
                for rank in ranks:
                    if os.waitpid(rank, 0)[1]:
                        raise SystemExit(f"{name}: a rank failed")
                ranks.clear()
        finally:
            for process in ranks + burners:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
            ours.close(), leaders.close()
        files = [(directory / f"rank-{rank}.jsonl").read_text().splitlines() for rank in range(plan.size)]
    followers = [[json.loads(line) for line in lines] for lines in files[1:]]
    return _rows(name, plan, [json.loads(line) for line in files[0]], followers)


def _rows(
    name: str, plan: Plan, sent: list[dict[str, Any]], received: list[list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    idle = [[row for row in rows if row["phase"] == "idle"] for rows in received]
    rows: dict[tuple[bool, int], dict[str, Any]] = {}
    at = 0
    of_phase = [[row for row in rows if row["phase"] != "idle"] for rows in received]
    for at, row in enumerate(sent):
        key = row["load"], row["size"]
        out = rows.setdefault(key, {"transport": name, "ranks": plan.size, "load": key[0], "bytes": key[1]})
        answers = [follower[at] for follower in of_phase]
        assert all((answer["phase"], answer["size"]) == (row["phase"], row["size"]) for answer in answers)
        if row["phase"] == "paced":
            begin = np.array(row["sent"])
            last = np.max([np.array(answer["times"][: len(begin)]) for answer in answers], axis=0)
            out["messages"] = len(begin)
            out["one_way_us"] = _percentiles(last - begin)
            out["publish_us"] = _percentiles(row["took"])
            out["leader_cpu_us"] = _short(row["cpu"] * 1e6)
            out["follower_cpu_us"] = _short(np.mean([a["cpu"] / a["count"] for a in answers]) * 1e6)
        elif row["phase"] == "trips":
            out["round_trip_us"] = _percentiles(row["trips"])
        else:
            seconds = max(answer["end"] for answer in answers) - row["begin"]
            out["messages_per_s"] = _short(row["count"] / seconds)
            out["megabytes_per_s"] = _short(row["count"] * row["size"] / seconds / 1e6)
    for place, load in enumerate((False, True)):
        shares = [100 * rows_of_rank[place]["cpu"] / rows_of_rank[place]["wall"] for rows_of_rank in idle]
        for row in rows.values():
            if row["load"] == load:
                row["waiting_cpu_percent"] = _short(float(np.mean(shares)), 3)
    return list(rows.values())


def _percentiles(nanoseconds: Any) -> dict[str, float]:
    p50, p99 = (np.percentile(nanoseconds, [50, 99]) / 1000).tolist()
    return {"p50": _short(p50), "p99": _short(p99)}


def _short(value: float, digits: int = 1) -> float:
    return round(float(value), digits)


def run(quick: bool) -> list[dict[str, Any]]:
    """All rows, with progress."""
    import torch.distributed  # noqa: F401  # before forking: each rank of Gloo would take seconds

    plans = [(name, ranks) for name in TRANSPORTS for ranks in RANKS]
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    print(f"{'transport':14} ranks load  {'bytes':>8} {'one way p50':>12} {'p99':>9} {'publish':>8} {'trip':>9} us")
    for done, (name, ranks) in enumerate(plans):
        transport, host = TRANSPORTS[name]
        amounts = (200, 100, 0.18, 0.001, 0.4) if quick else (2000, 1000, 1.5, 0.001, 3.0)
        new = measure(name, Plan(transport, host, ranks, SIZES, *amounts))
        rows += new
        for row in new:
            print(
                f"{name:14} {ranks:5} {'yes' if row['load'] else 'no':4} {row['bytes']:9,} "
                f"{row['one_way_us']['p50']:12,.1f} {row['one_way_us']['p99']:9,.1f} {row['publish_us']['p50']:8,.1f} "
                f"{row['round_trip_us']['p50']:9,.1f}"
            )
        print(f"-- {done + 1} of {len(plans)} done, {time.monotonic() - began:.0f} s", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer messages; everything is still covered")
    parser.add_argument(
        "--engine", action="store_true", help="also run a real engine of several ranks on each transport"
    )
    parser.add_argument("--only-engine", action="store_true", help="keep the other figures of the file as they are")
    parser.add_argument("--model", default="smollm2-135m", help="for --engine")
    parser.add_argument("--ranks", type=int, default=3, help="for --engine; the model's heads must divide by it")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--plot", type=Path, default=PLOT)
    arguments = parser.parse_args()
    report = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    report["machine"] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
        "quick": arguments.quick,
    }
    if not arguments.only_engine:
        report["bells_us"] = measure_bells(3000 if arguments.quick else 20_000)
        print("bells, one way, us:", report["bells_us"], flush=True)
        report["rows"] = run(arguments.quick)
    if arguments.engine or arguments.only_engine:
        from control_plane_engine import measure_engines

        report["engine"] = measure_engines(arguments.model, arguments.ranks, arguments.quick)
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"figures: {arguments.json}")
    if "rows" in report:
        arguments.plot.write_text(as_svg(report))
        print(f"plot: {arguments.plot}")
        if (arguments.json, arguments.plot) == (RESULTS, PLOT):
            PAGE.write_text(fill(PAGE.read_text(), report))
            print(f"tables: {PAGE}")


if __name__ == "__main__":
    main()
