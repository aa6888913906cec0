"""A serving benchmark as one picture: SVG text without any other file, light or dark as the reader's system is.

Top: how each latency is distributed. Below: every request from its sending over its first token to its end, and how
many tokens came in each moment. Owns the drawing only.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from stretto.bench.serve import ServeReport
from stretto.bench.serve_figures import LATENCIES, FloatArray
from stretto.bench.serve_request import Outcome

WIDTH, _MARGIN, _GAP = 1120, 32, 20
_PANEL_TOP, _PANEL_HEIGHT = 118, 170
_LANES_TOP, _LANES_HEIGHT = 356, 250
_RATE_TOP, _RATE_HEIGHT = 664, 110
HEIGHT = 828
_MOST_LANES = 400
_MOST_POINTS = 200
_BINS = 120
_STYLE = """
svg { background: #faf9f6; font: 13px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
text { fill: #23211d; } .dim { fill: #6f6a60; font-size: 12px; } .title { font-size: 20px; font-weight: 650; }
.head { font-weight: 600; } .num { font-variant-numeric: tabular-nums; }
.card { fill: #fff; stroke: #e4e1da; } .grid { stroke: #ece9e2; }
.curve { fill: none; stroke: #2f6f5e; stroke-width: 2; }
.area { fill: #2f6f5e; fill-opacity: .12; } .mark { stroke: #c2571a; stroke-dasharray: 3 3; }
.wait { stroke: #d9a441; } .run { stroke: #2f6f5e; } .bad { stroke: #d13438; }
@media (prefers-color-scheme: dark) {
  svg { background: #0f1115; } text { fill: #e9ebef; } .dim { fill: #8f97a5; } .card { fill: #161a20; stroke: #272d37; }
  .grid { stroke: #232933; } .curve { stroke: #6fd0b4; } .area { fill: #6fd0b4; } .mark { stroke: #ff9a55; }
  .wait { stroke: #d9a441; } .run { stroke: #4fb296; } .bad { stroke: #ff6a6e; }
}
"""


def as_svg(report: ServeReport, title: str) -> str:
    """The picture."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{escape(title)}">',
        f"<style>{_STYLE}</style>",
        _text(_MARGIN, 42, title, "title"),
        _text(_MARGIN, 68, _summary(report), "dim num"),
        *_distributions(report),
        *_requests(report.outcomes, report.figures.duration_s),
        *_rate(report.outcomes, report.figures.duration_s),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _summary(report: ServeReport) -> str:
    f = report.figures
    words = [
        f"{f.completed} requests in {f.duration_s:.1f} s",
        f"{f.request_throughput:.2f} requests/s",
        f"{f.output_throughput:,.0f} output tokens/s",
        f"at most {f.peak_concurrency} at once",
    ]
    if f.failed:
        words.insert(1, f"{f.failed} failed")
    if f.request_goodput is not None:
        words.append(f"goodput {f.request_goodput:.2f} requests/s")
    return "  ·  ".join(words)


def _distributions(report: ServeReport) -> list[str]:
    done = [o for o in report.outcomes if o.error is None]
    values = {
        "ttft": [o.ttft for o in done],
        "tpot": [o.tpot for o in done if o.tpot is not None],
        "itl": [gap for o in done for gap in o.itl],
        "e2el": [o.latency for o in done],
    }
    width = (WIDTH - 2 * _MARGIN - 3 * _GAP) / 4
    parts: list[str] = []
    for place, name in enumerate(LATENCIES):
        x = _MARGIN + place * (width + _GAP)
        parts.append(_text(x, _PANEL_TOP - 12, f"{name.upper()}: share of values below, ms", "dim"))
        parts += _distribution(np.sort(np.asarray(values[name])) * 1000, x, width)
    return parts


def _distribution(sorted_ms: FloatArray, x: float, width: float) -> list[str]:
    y, height = _PANEL_TOP, _PANEL_HEIGHT
    parts = [_card(x, y, width, height)]
    if not len(sorted_ms):
        return [*parts, _text(x + 14, y + height / 2, "no values", "dim")]
    p50, p99 = np.percentile(sorted_ms, [50, 99]).tolist()
    high = max(float(sorted_ms[-1]) if sorted_ms[-1] < 2 * p99 else 1.25 * p99, 1e-9)
    inner, base, top = width - 28, y + height - 34, y + 16

    def across(value: float) -> float:
        return x + 14 + inner * min(value / high, 1.0)

    shares = np.linspace(0, 1, min(len(sorted_ms), _MOST_POINTS) + 1)
    points = [
        (across(float(value)), base - (base - top) * share)
        for value, share in zip(np.quantile(sorted_ms, shares).tolist(), shares.tolist(), strict=True)
    ]
    line = " ".join(f"{a:.1f},{b:.1f}" for a, b in [(points[0][0], base), *points, (x + 14 + inner, top)])
    parts += [f'<path class="grid" d="M{x + 14:.1f} {base - (base - top) * s:.1f}h{inner:.1f}"/>' for s in (0, 0.5, 1)]
    parts.append(f'<polygon class="area" points="{line} {x + 14 + inner:.1f},{base:.1f}"/>')
    parts.append(f'<polyline class="curve" points="{line}"/>')
    parts += [f'<path class="mark" d="M{across(value):.1f} {base}V{top}"/>' for value in (p50, p99)]
    parts.append(_text(x + 14, y + height - 12, f"p50 {_short(p50)}", "num"))
    parts.append(_text(x + width - 14, y + height - 12, f"p99 {_short(p99)}", "num", "end"))
    return parts


def _requests(outcomes: Sequence[Outcome], duration: float) -> list[str]:
    x, y, width, height = _MARGIN, _LANES_TOP, WIDTH - 2 * _MARGIN, _LANES_HEIGHT
    step = max(1, -(-len(outcomes) // _MOST_LANES))
    shown = sorted(outcomes, key=lambda o: o.sent)[::step]
    which = "Requests" if step == 1 else f"Every {step}th request"
    parts = [
        _text(x, y - 12, f"{which}, in the order of sending: amber to the first token, green to the last", "dim"),
        _card(x, y, width, height),
    ]
    pitch = (height - 20) / max(len(shown), 1)
    scale = (width - 28) / duration
    for lane, outcome in enumerate(shown):
        at = y + 10 + pitch * (lane + 0.5)
        sent = x + 14 + outcome.sent * scale
        thick = f'stroke-width="{min(max(pitch * 0.7, 0.5), 8):.2f}"'
        if outcome.error is not None or not outcome.chunks:
            kind = "bad" if outcome.error is not None else "wait"
            parts.append(f'<path class="{kind}" {thick} d="M{sent:.1f} {at:.1f}h4"/>')
            continue
        wait, run = outcome.ttft * scale, (outcome.latency - outcome.ttft) * scale
        parts.append(f'<path class="wait" {thick} d="M{sent:.2f} {at:.2f}h{wait:.2f}"/>')
        parts.append(f'<path class="run" {thick} d="M{sent + wait:.2f} {at:.2f}h{max(run, 0.5):.2f}"/>')
    parts += _seconds(x + 14, y + height + 18, width - 28, duration)
    return parts


def _rate(outcomes: Sequence[Outcome], duration: float) -> list[str]:
    x, y, width, height = _MARGIN, _RATE_TOP, WIDTH - 2 * _MARGIN, _RATE_HEIGHT
    parts = [_card(x, y, width, height)]
    times = np.array([at for o in outcomes for at in o.chunks])
    weights = np.array([o.num_output / len(o.chunks) for o in outcomes for _ in o.chunks])
    sums, edges = np.histogram(times, bins=_BINS, range=(0, duration), weights=weights)
    rates = sums / (edges[1] - edges[0])
    high = max(float(rates.max(initial=0)), 1e-9)
    parts.append(_text(x, y - 12, f"Output tokens per second (highest: {high:,.0f})", "dim num"))
    base, tall, wide = y + height - 10, height - 24, (width - 28) / _BINS
    steps = "".join(f"V{base - tall * rate / high:.1f}h{wide:.3f}" for rate in rates.tolist())
    parts.append(f'<path class="area" d="M{x + 14} {base}{steps}V{base}Z"/>')
    parts.append(f'<path class="curve" d="M{x + 14} {base}{steps}V{base}"/>')
    return [*parts, *_seconds(x + 14, y + height + 18, width - 28, duration)]


def _seconds(x: float, y: float, width: float, duration: float) -> list[str]:
    """An axis with a mark at every 1, 2 or 5 times a power of ten seconds: four to ten of them."""
    power = 10.0 ** np.floor(np.log10(duration / 4))
    step = next(power * times for times in (10, 5, 2, 1) if power * times <= duration / 4)
    return [
        _text(x + width * at / duration, y, f"{at:g} s", "dim num", "middle" if at else "start")
        for at in np.arange(0, duration * 0.98, step).tolist()
    ]


def _short(ms: float) -> str:
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def _card(x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="card" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="10"/>'
