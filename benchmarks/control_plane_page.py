"""The tables of docs/control-plane.md, written into the page between its two marks. Owns no figure."""

from __future__ import annotations

from typing import Any

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
SHOWN = (64, 16 * 1024, 1024 * 1024)


def fill(page: str, report: dict[str, Any]) -> str:
    """The page with the report's figures. Raises ValueError if it has no marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError("the page has no marks for its figures")
    return f"{before}{BEGIN}\n{tables(report)}{END}{after}"


def tables(report: dict[str, Any]) -> str:
    """All tables as Markdown."""
    machine, bells = report["machine"], report["bells_us"]
    parts = [
        f"{machine['cores']} cores ({machine['machine']}), Python {machine['python']}, {machine['date']}; in us.",
        "![latency by message size](images/control-plane.svg)",
        "Until the last rank has a message, p50 / p99:",
        _latency(report["rows"]),
        "With 64-byte messages, idle machine: what it costs, p50 or mean:",
        _costs(report["rows"]),
        "From a ring to the waking of the other process, p50 / p99: "
        + ", ".join(f"{name} {us['p50']:g} / {us['p99']:g}" for name, us in bells.items())
        + ".",
    ]
    if "engine" in report:
        parts += ["A real engine, SmolLM2-135M on the CPU, batch 4 (medians):", _engine(report["engine"])]
    return "\n\n".join(parts) + "\n"


def _latency(rows: list[dict[str, Any]]) -> str:
    shown = [row for row in rows if row["bytes"] in SHOWN]
    head = [f"{size} B" if size < 1024 else f"{size // 1024} KB" for size in SHOWN]
    lines = [
        "| transport | ranks | " + " | ".join(f"{name}, {how}" for how in ("idle", "load") for name in head) + " |"
    ]
    lines.append("|---|---" + "|---:" * 2 * len(SHOWN) + "|")
    for transport, ranks in dict.fromkeys((row["transport"], row["ranks"]) for row in shown):
        own = [row for row in shown if (row["transport"], row["ranks"]) == (transport, ranks)]
        own.sort(key=lambda row: (row["load"], row["bytes"]))
        cells = [f"{row['one_way_us']['p50']:,.0f} / {row['one_way_us']['p99']:,.0f}" for row in own]
        lines.append(f"| {transport} | {ranks} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _costs(rows: list[dict[str, Any]]) -> str:
    names = (
        "publish",
        "round trip",
        "CPU, leader",
        "CPU, follower",
        "messages/s",
        "MB/s (1 MB)",
        "CPU of a waiting rank",
    )
    lines = [f"| transport | ranks | {' | '.join(names)} |", "|---|---" + "|---:" * len(names) + "|"]
    idle = {(row["transport"], row["ranks"], row["bytes"]): row for row in rows if not row["load"]}
    for (transport, ranks, size), row in idle.items():
        if size == 64:
            lines.append(
                f"| {transport} | {ranks} | {row['publish_us']['p50']:,.1f} | {row['round_trip_us']['p50']:,.0f} "
                f"| {row['leader_cpu_us']:,.1f} | {row['follower_cpu_us']:,.1f} | {row['messages_per_s']:,.0f} "
                f"| {idle[transport, ranks, 2**20]['megabytes_per_s']:,.0f} | {row['waiting_cpu_percent']:.2f} % |"
            )
    return "\n".join(lines)


def _engine(engines: dict[str, dict[str, float]]) -> str:
    lines = ["| | bubble share | ms per step | tokens/s |", "|---|---:|---:|---:|"]
    for name, row in engines.items():
        lines.append(
            f"| {name} | {100 * row['bubble_share']:.2f} % | {row['step_ms']:.2f} | {row['tokens_per_s']:.1f} |"
        )
    return "\n".join(lines)
