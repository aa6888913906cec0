"""Compares two traces, step against step: what became slower, which causes came or went.

Owns the comparison; both sides are what `report_json` says. Means per step are compared, so that traces of different
length can be, and so that causes and kernels add up; only the overlap window is a median.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stretto.observe.trace.kinds import CAUSE_WORDS, Cause
from stretto.observe.trace.report_text import duration

_MOST_KERNELS = 12
_LEAST_SHARE = 0.002


def diff(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """The differences of two analyses (as JSON types), busiest device against busiest device: means per step, in us."""
    a, b = before["devices"][0], after["devices"][0]
    steps_a, steps_b = max(1, len(a["steps"])), max(1, len(b["steps"]))
    mean_a, mean_b = a["length_us"] / steps_a, b["length_us"] / steps_b
    causes = sorted(set(a["idle_by_cause_us"]) | set(b["idle_by_cause_us"]))
    idle = {
        cause: [a["idle_by_cause_us"].get(cause, 0.0) / steps_a, b["idle_by_cause_us"].get(cause, 0.0) / steps_b]
        for cause in causes
    }
    kernel_times = [{k["name"]: k["total_us"] / n for k in side["kernels"]} for side, n in ((a, steps_a), (b, steps_b))]
    kernels = {
        name: [kernel_times[0].get(name, 0.0), kernel_times[1].get(name, 0.0)]
        for name in kernel_times[0] | kernel_times[1]
    }
    least = _LEAST_SHARE * max(mean_a, mean_b)
    changed = {name: pair for name, pair in kernels.items() if abs(pair[1] - pair[0]) >= least}
    keys = [{_key(finding): finding for finding in side["findings"]} for side in (a, b)]
    return {
        "before": before["trace"],
        "after": after["trace"],
        "steps": [steps_a, steps_b],
        "step_mean_us": [mean_a, mean_b],
        "busy_share": [a["busy_share"], b["busy_share"]],
        "overlap_window_us": [a["overlap_window_us"], b["overlap_window_us"]],
        "host_work_hidden_share": [a["host_work_hidden_share"], b["host_work_hidden_share"]],
        "idle_by_cause_us": dict(sorted(idle.items(), key=lambda item: -abs(item[1][1] - item[1][0]))),
        "kernels_us": dict(sorted(changed.items(), key=lambda item: -abs(item[1][1] - item[1][0]))),
        "came": [keys[1][key] for key in keys[1] if key not in keys[0]],
        "went": [keys[0][key] for key in keys[0] if key not in keys[1]],
    }


def print_diff(result: dict[str, Any], console: Console) -> None:
    """Print a comparison."""
    console.print(Text(f"{result['before']}  ->  {result['after']}", style="bold"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("mean per step")
    for title in ("before", "after", "change"):
        table.add_column(title, justify="right")
    _row(table, "time", result["step_mean_us"], _time)
    _row(table, "device busy", result["busy_share"], _percent, more_is_good=True)
    if None not in result["overlap_window_us"]:
        _row(table, "overlap window (median)", result["overlap_window_us"], _time, more_is_good=True)
    if None not in result["host_work_hidden_share"]:
        _row(table, "host work hidden", result["host_work_hidden_share"], _percent, more_is_good=True)
    for cause, pair in result["idle_by_cause_us"].items():
        if max(pair) >= _LEAST_SHARE * max(result["step_mean_us"]):
            _row(table, f"idle: {CAUSE_WORDS[Cause(cause)]}", pair, _time)
    for name, pair in list(result["kernels_us"].items())[:_MOST_KERNELS]:
        _row(table, name if len(name) <= 50 else name[:47] + "...", pair, _time)
    console.print(table)
    for title, style, findings in (("came", "red", result["came"]), ("went", "green", result["went"])):
        for finding in findings:
            where = f" at {finding['location']}" if finding["location"] else ""
            console.print(Text(f"{title}: {finding['title']}{where}", style=style))


def _row(
    table: Table, name: str, pair: list[float], shown: Callable[[float], str], *, more_is_good: bool = False
) -> None:
    change = pair[1] - pair[0]
    relative = abs(change) / max(abs(pair[0]), abs(pair[1]), 1e-9)
    style = "" if relative < 0.01 else "green" if (change > 0) == more_is_good else "red"
    sign = "-" if change < 0 else "+"
    table.add_row(name, shown(pair[0]), shown(pair[1]), Text(sign + shown(abs(change)), style=style))


def _time(us: float) -> str:
    return duration(1e3 * us)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _key(finding: dict[str, Any]) -> tuple[str, str, str]:
    return finding["cause"], finding["kind"], finding["location"]
