"""The summary for a terminal: the verdict, the worst line first and how to fix it, then the figures.

Owns the wording and the layout. Written with rich; without a terminal it is plain text.
"""

from __future__ import annotations

import textwrap

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stretto.observe.trace.analysis import Analysis, DeviceReport
from stretto.observe.trace.findings import Finding
from stretto.observe.trace.kinds import CAUSE_WORDS, Cause, Severity

_BAR = 40
_FRAMES = 4
_COLOURS = {
    Cause.SYNC: "red",
    Cause.PLANNED_WAIT: "magenta",
    Cause.UPLOAD: "yellow",
    Cause.ALLOCATION: "yellow",
    Cause.HOST_LATE: "dark_orange",
    Cause.HOST_WAITING: "bright_black",
    Cause.LAUNCH_BOUND: "blue",
    Cause.COPY: "cyan",
    Cause.DEVICE: "bright_black",
    Cause.UNKNOWN: "bright_black",
}


def print_report(analysis: Analysis, console: Console, *, most: int = 6) -> None:
    """Print the report of every device, at most `most` findings of each."""
    for warning in analysis.trace.warnings:
        console.print(f"[yellow]note:[/] {warning}", highlight=False)
    for i, report in enumerate(analysis.devices):
        if i:
            console.print()
        _print_device(analysis, report, console, most)


def duration(ns: float) -> str:
    """A time in the unit that suits it."""
    for limit, unit, scale in ((1e3, "ns", 1.0), (1e6, "us", 1e3), (1e9, "ms", 1e6)):
        if abs(ns) < limit:
            value = ns / scale
            return f"{value:.0f} {unit}" if value >= 100 or scale == 1.0 else f"{value:.3g} {unit}"
    return f"{ns / 1e9:.2f} s"


def verdict(report: DeviceReport) -> str:
    """One sentence: does host work overlap with the device, and what is the first thing to fix?"""
    hidden = [finding for finding in report.findings if finding.is_hidden_sync]
    lost = sum(finding.severity is Severity.LOST for finding in hidden)
    if not report.findings:
        return "The device never waits for the host; no hidden syncs."
    first = report.findings[0]
    share = first.idle_ns / max(1, report.length_ns)
    if lost:
        syncs = "a hidden sync makes" if lost == 1 else f"{lost} hidden syncs make"
        return f"Overlap is lost: {syncs} the host wait for the device inside the step."
    if hidden and share < 0.01:
        return "Overlap holds, but an upload from pageable memory delays the launches."
    return f"{CAUSE_WORDS[first.cause].capitalize()}: it costs {100 * share:.1f} % of the device's time."


def _print_device(analysis: Analysis, report: DeviceReport, console: Console, most: int) -> None:
    console.print(_title(analysis, report))
    console.print(_busy_bar(report))
    console.print()
    console.print(Text(verdict(report), style="bold"))
    for place, finding in enumerate(report.findings[:most], 1):
        console.print()
        _print_finding(report, finding, place, console)
    left = len(report.findings) - most
    if left > 0:
        console.print(f"\n{left} smaller findings: --all shows them", style="dim")
    console.print()
    console.print(_figures(report))
    if report.replay_error is None:
        console.print("The replay does not reproduce this trace, so no gains are given.", style="dim")


def _title(analysis: Analysis, report: DeviceReport) -> Text:
    steps = f"{len(report.steps)} steps, median {duration(report.step_ns)}" if len(report.steps) > 1 else "one step"
    device = report.name or ("CPU" if report.device == "cpu" else f"device {report.device}")
    if report.name and len(analysis.devices) > 1:
        device += f" ({report.device})"
    rank = f" - rank {analysis.trace.rank}" if analysis.trace.rank is not None else ""
    title = Text(f"{analysis.trace.path}", style="bold")
    return title.append(f"\n{analysis.trace.source} - {device}{rank} - {steps}, by {report.steps.method}", style="dim")


def _busy_bar(report: DeviceReport) -> Text:
    """The device's time as a bar: computing, then what it lost, by cause."""
    whole = max(1, report.length_ns)
    bar = Text()
    parts = [("green", report.compute_ns)] + [
        (_COLOURS[cause], length) for cause, length in report.idle_by_cause.items()
    ]
    reach, cells = 0, 0
    for colour, length in parts:
        reach += length
        wanted = min(_BAR, round(_BAR * reach / whole))
        bar.append("█" * (wanted - cells), style=colour)
        cells = max(cells, wanted)
    bar.append("░" * (_BAR - cells), style="bright_black")
    bar.append(f" computing {100 * report.compute_ns / whole:.1f} %")
    for cause, length in report.idle_by_cause.items():
        if length >= 0.005 * whole:
            bar.append(f" · {CAUSE_WORDS[cause]} {100 * length / whole:.1f} %", style=_COLOURS[cause])
    return bar


def _print_finding(report: DeviceReport, finding: Finding, place: int, console: Console) -> None:
    steps = max(1, len(report.steps))
    head = Text(f"{place}. ", style="bold")
    if finding.is_hidden_sync and finding.severity is not None:
        style = "bold white on red" if finding.severity is Severity.LOST else "bold black on yellow"
        head.append(f" {finding.severity.upper()} ", style=style).append(" ")
    head.append(finding.title, style=f"bold {_COLOURS[finding.cause]}")
    console.print(head)
    if finding.location:
        console.print(Text(f"   at {finding.location}", style="cyan").append(where(finding), style="dim cyan"))
    around = [name for name in finding.stack if name != finding.location]
    if around:
        console.print(Text("   in " + " < ".join(_short(name) for name in around[:_FRAMES]), style="dim"))
    cost = f"   {finding.count} times; device idle {duration(finding.idle_ns / steps)} a step"
    if finding.blocked_ns:
        cost += f", host blocked {duration(finding.blocked_ns / steps)} a step"
    if finding.gain_ns:
        before, after = report.length_ns, max(1, report.length_ns - finding.gain_ns)
        cost += f"; without it: {duration(finding.gain_ns / steps)} a step less, {before / after:.2f}x"
    console.print(Text(cost))
    for line in textwrap.wrap(f"fix: {finding.remedy}", max(40, min(console.width, 120) - 6)):
        console.print(Text(f"   {line}", style="green"))


def where(finding: Finding) -> str:
    """What is known of the line beyond the function: ", probably line 93 (.item())"; "" if nothing is, or all."""
    lines: dict[int, str] = {}
    for guess in finding.guesses:
        lines[guess.line] = f"{lines[guess.line]}, {guess.what}" if guess.line in lines else guess.what
    if not lines:
        return ""
    *most, last = [f"{line} ({what})" for line, what in sorted(lines.items())]
    return f", probably line {', '.join(most)} or {last}" if most else f", probably line {last}"


def _short(name: str) -> str:
    return name if len(name) <= 60 else name[:57] + "..."


def _figures(report: DeviceReport) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    whole = max(1, report.length_ns)
    idle = whole - report.busy_ns
    table.add_row("device busy", f"{100 * report.busy_ns / whole:.1f} % of {duration(whole)}, idle {duration(idle)}")
    window = report.window_ns
    if window is not None:
        share = f" ({100 * window / report.step_ns:.0f} % of a median step)" if report.step_ns else ""
        table.add_row(
            "overlap window", f"median {duration(window)}{share}, from the end of a launch to the first block"
        )
    if report.overlap.hidden_share is not None:
        table.add_row("host work hidden", f"{100 * report.overlap.hidden_share:.1f} % done while the device was busy")
    if report.queue is not None:
        table.add_row(
            "launch queue",
            f"{report.queue.depth_median:.0f} launches deep (median; most {report.queue.depth_most}), "
            f"{duration(report.queue.ahead_median_ns)} ahead; "
            f"empty at {100 * report.queue.empty_share:.1f} % of launches",
        )
    if report.several_streams_share >= 0.001:
        table.add_row(
            "streams", f"two or more work at once in {100 * report.several_streams_share:.1f} % of the busy time"
        )
    if report.pageable_copies:
        table.add_row("pageable copies", f"{report.pageable_copies}, {report.pageable_bytes / 1e6:.3g} MB")
    harmless = sum(
        not one.drained for one in report.blocking if one.severity in (Severity.OVERLAPPED, Severity.PLANNED)
    )
    if harmless:
        table.add_row("harmless waits", f"{harmless} with more work queued on the device")
    return table
