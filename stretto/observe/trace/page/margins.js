// What is around the timeline's lanes: their names on the left, times and steps above.

const GUTTER = 168, RULER = 46;

class Margins {
  constructor(timeline) { this.timeline = timeline; }

  gutter(c, top, height) {
    const timeline = this.timeline, theme = timeline.theme;
    c.fillStyle = theme.gutter;
    c.fillRect(0, RULER, GUTTER - 1, height);
    c.fillStyle = theme.line;
    c.fillRect(GUTTER - 1, 0, 1, height);
    for (const lane of timeline.lanes.all) {
      const y = lane.y + top;
      if (y + lane.height < RULER || y > height) continue;
      c.save();
      c.beginPath();
      c.rect(0, RULER, GUTTER - 8, height);
      c.clip();
      c.fillStyle = theme.ink;
      c.font = "600 12px system-ui, sans-serif";
      c.fillText(lane.name, 14, y + Math.min(11, lane.height / 2));
      if (lane.height > 22) {
        c.fillStyle = theme.dim;
        c.font = "10.5px system-ui, sans-serif";
        c.fillText(lane.note, 14, y + 25 > y + lane.height ? y + lane.height - 3 : y + 25);
      }
      c.restore();
      c.fillStyle = theme.grid;
      c.fillRect(0, y + lane.height + LANE_SPACE / 2, timeline.canvas.clientWidth, 1);
    }
  }

  ruler(c, width) {
    const timeline = this.timeline, theme = timeline.theme;
    c.fillStyle = theme.card;
    c.fillRect(0, 0, width, RULER);
    c.fillStyle = theme.line;
    c.fillRect(0, RULER - 1, width, 1);
    const step = niceStep(timeline.range / (timeline.width / 110));
    c.font = "11px ui-monospace, Menlo, Consolas, monospace";
    c.save();
    c.beginPath();
    c.rect(GUTTER, 0, width, RULER);
    c.clip();
    for (let t = Math.ceil(timeline.begin / step) * step; t < timeline.end; t += step) {
      const x = timeline.x(t);
      c.fillStyle = theme.grid;
      c.fillRect(x, 0, 1, 20);
      c.fillStyle = theme.dim;
      c.fillText(tickText(t, step), x + 4, 11);
    }
    const { start, labels } = timeline.device.steps;
    const crowd = (58 * timeline.range * start.length) / (timeline.width * Math.max(1, timeline.trace.length));
    const every = crowd > 1 ? niceStep(crowd) : 1;
    for (let i = Math.max(0, lowerBound(start, timeline.begin) - 1); i < start.length && start[i] < timeline.end; i++) {
      if (i % every) continue;
      const x = timeline.x(start[i]);
      c.fillStyle = theme.accent;
      c.fillRect(x, 24, 2, 16);
      c.fillStyle = theme.ink;
      c.font = "600 11px system-ui, sans-serif";
      c.fillText(every > 1 ? labels[i] : `step ${labels[i]}`, x + 6, 33);
    }
    c.restore();
    c.fillStyle = theme.dim;
    c.font = "10.5px system-ui, sans-serif";
    c.fillText("time", 14, 11);
    c.fillText("steps", 14, 33);
    if (timeline.pointer.marking) {
      const [a, b] = timeline.pointer.marking;
      c.globalAlpha = 0.2;
      c.fillStyle = theme.accent;
      c.fillRect(Math.min(a, b), 0, Math.abs(b - a), timeline.canvas.clientHeight);
      c.globalAlpha = 1;
    }
  }
}

function niceStep(about) {
  const power = 10 ** Math.floor(Math.log10(about));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= about);
}

function tickText(ns, step) {
  const [scale, unit] = step >= 1e8 ? [1e9, "s"] : step >= 1e5 ? [1e6, "ms"] : step >= 100 ? [1e3, "µs"] : [1, "ns"];
  const digits = Math.max(0, Math.ceil(-Math.log10(step / scale) - 1e-9));
  return `${(ns / scale).toFixed(digits)} ${unit}`;
}
