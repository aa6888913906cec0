"""The control plane's latencies as one picture: SVG text without any other file, light or dark as the reader's system.

Owns the drawing only. A panel for each number of ranks, idle above, under load below; both axes grow by factors.
"""

from __future__ import annotations

from html import escape
from math import log10
from typing import Any

WIDTH, HEIGHT = 1120, 720
_MARGIN, _GAP, _TOP, _PANEL_HEIGHT = 32, 20, 132, 240
_STYLE = """
svg { background: #faf9f6; font: 13px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
text { fill: #23211d; } .dim { fill: #6f6a60; font-size: 12px; } .title { font-size: 20px; font-weight: 650; }
.num { font-variant-numeric: tabular-nums; } .card { fill: #fff; stroke: #e4e1da; } .grid { stroke: #ece9e2; }
polyline { fill: none; stroke-width: 2; } .p99 { stroke-dasharray: 3 4; stroke-width: 1.4; }
.c0 { stroke: #2f6f5e; } .c1 { stroke: #c2571a; } .c2 { stroke: #d9a441; } .c3 { stroke: #5b5fc7; }
@media (prefers-color-scheme: dark) {
  svg { background: #0f1115; } text { fill: #e9ebef; } .dim { fill: #8f97a5; } .card { fill: #161a20; stroke: #272d37; }
  .grid { stroke: #232933; } .c0 { stroke: #6fd0b4; } .c1 { stroke: #ff9a55; } .c3 { stroke: #9ea2ff; }
}
"""


def as_svg(report: dict[str, Any]) -> str:
    """The picture of a report of `control_plane.py`."""
    rows, machine = report["rows"], report["machine"]
    transports = list(dict.fromkeys(row["transport"] for row in rows))
    ranks = sorted({row["ranks"] for row in rows})
    title = "Control plane: until the last rank has a message"
    values = [value for row in rows for value in row["one_way_us"].values()]
    low, high = _power(min(values), up=False), _power(max(values), up=True)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{escape(title)}">',
        f"<style>{_STYLE}</style>",
        _text(_MARGIN, 42, title, "title"),
        _text(
            _MARGIN,
            68,
            f"microseconds by message size, p50 (line) and p99 (dashed); {machine['cores']} cores, {machine['date']}",
            "dim num",
        ),
        *_legend(transports),
    ]
    width = (WIDTH - 2 * _MARGIN - (len(ranks) - 1) * _GAP) / len(ranks)
    for down, load in enumerate((False, True)):
        for across, size in enumerate(ranks):
            panel = [row for row in rows if row["ranks"] == size and row["load"] == load]
            x, y = _MARGIN + across * (width + _GAP), _TOP + down * (_PANEL_HEIGHT + 56)
            parts.append(_text(x, y - 10, f"{size} ranks, {'every core burning' if load else 'idle machine'}", "dim"))
            parts += _panel(panel, transports, x, y, width, (low, high))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    rows: list[dict[str, Any]], transports: list[str], x: float, y: float, width: float, span: tuple[int, int]
) -> list[str]:
    sizes = sorted({row["bytes"] for row in rows})
    left, right, top, base = x + 76, x + width - 18, y + 14, y + _PANEL_HEIGHT - 30
    parts = [f'<rect class="card" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_PANEL_HEIGHT}" rx="10"/>']

    def place(size: int) -> float:
        return left + (right - left) * sizes.index(size) / max(len(sizes) - 1, 1)

    def height(value: float) -> float:
        return base - (base - top) * (log10(value) - span[0]) / (span[1] - span[0])

    for power in range(span[0], span[1] + 1):
        at = height(10.0**power)
        parts.append(f'<path class="grid" d="M{left:.1f} {at:.1f}H{right:.1f}"/>')
        parts.append(_text(left - 8, at + 4, f"{10**power:,}", "dim num", "end"))
    parts += [_text(place(size), base + 18, _bytes(size), "dim num", "middle") for size in sizes]
    for number, transport in enumerate(transports):
        own = sorted((row for row in rows if row["transport"] == transport), key=lambda row: row["bytes"])
        for which in ("p50", "p99"):
            points = " ".join(f"{place(row['bytes']):.1f},{height(row['one_way_us'][which]):.1f}" for row in own)
            parts.append(f'<polyline class="c{number % 4} {which}" points="{points}"/>')
    return parts


def _legend(transports: list[str]) -> list[str]:
    parts = []
    for number, transport in enumerate(transports):
        x = _MARGIN + 170 * number
        parts.append(f'<polyline class="c{number % 4}" points="{x},90 {x + 26},90"/>')
        parts.append(_text(x + 34, 94, transport, "num"))
    return parts


def _power(value: float, up: bool) -> int:
    power = int(log10(value) // 1)
    return power + 1 if up else power


def _bytes(size: int) -> str:
    for unit, name in ((2**20, "MB"), (2**10, "KB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'
