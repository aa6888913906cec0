// The lanes: what the host and the device did in the last steps, drawn from the engine's own clock.

const MOST_STEPS = 256;
const GUTTER = 54;

const lanes = {
  columns: [],
  steps: [],
  count: 8,
  paused: false,
  chosen: null,
  view: [0, 1],

  start() {
    this.canvas = $("lanes");
    const zoom = (factor) => {
      this.count = Math.min(64, Math.max(2, Math.round(this.count * factor)));
      this.aim();
    };
    $("fewer").addEventListener("click", () => zoom(0.5));
    $("more").addEventListener("click", () => zoom(2));
    $("pause").addEventListener("click", () => this.pause(!this.paused));
    this.canvas.addEventListener("pointermove", (event) => this.choose(this.at(event.offsetX)));
    this.canvas.addEventListener("pointerleave", () => this.choose(null));
    this.canvas.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by) return;
      event.preventDefault();
      this.pause(true);
      const shown = this.shown(), now = shown.indexOf(this.chosen);
      this.choose(shown[Math.min(shown.length - 1, Math.max(0, now < 0 ? shown.length - 1 : now + by))] ?? null);
    });
    new ResizeObserver(() => this.redraw()).observe(this.canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
    $("legend").replaceChildren(...[
      ["even", " steps", "even"], ["odd steps", "", "odd"], ["host waits", "", "wait"], ["overlap", " window", "window"],
      ["bubble", "", "bubble"],
    ].map(([text, more, name]) => {
      const swatch = make("i");
      swatch.style.background = `var(--${name})`;
      return make("li", {}, swatch, make("span", {}, text, make("span", { className: "desk" }, more)));
    }));
  },

  pause(is) {
    this.paused = is;
    $("pause").setAttribute("aria-pressed", String(is));
    if (!is) {
      this.choose(null);
      this.aim();
    }
  },

  /** New rows from the engine. A step that comes before the last one is of a restarted engine. */
  take(rows) {
    if (!rows.length) return;
    const fresh = rows.map((row) => Object.fromEntries(this.columns.map((name, i) => [name, row[i]])));
    if (this.steps.length && fresh[0].index <= this.steps.at(-1).index) this.steps = [];
    this.steps = [...this.steps, ...fresh].slice(-MOST_STEPS);
    if (!this.paused) this.aim();
  },

  /** The newest steps in a row: not across a pause in which nobody wanted anything, nor across steps not seen. */
  shown() {
    const last = this.steps.length - 1;
    let first = last;
    while (first > 0 && last - first + 1 < this.count) {
      const step = this.steps[first], before = this.steps[first - 1];
      const usual = Math.max(step.device_end - step.device_begin, before.device_end - before.device_begin, 0.002);
      if (step.index !== before.index + 1 || step.device_begin - before.device_end > 4 * usual + step.bubble_s) break;
      first--;
    }
    return this.steps.slice(Math.max(first, 0));
  },

  /** Turns to the newest steps: glides there, or jumps for who wants no motion. */
  aim() {
    const shown = this.shown();
    if (!shown.length) return;
    const begin = Math.min(shown[0].receive_begin, shown[0].device_begin);
    const end = Math.max(...shown.map((step) => Math.max(step.device_end, step.process_end)));
    this.goal = [begin, begin + (end - begin) * 1.02];
    const near = Math.abs(this.goal[0] - this.view[0]) < 3 * (this.goal[1] - this.goal[0]);
    if (calm.matches || !near) this.view = this.goal;
    this.redraw();
  },

  redraw() { this.frame ||= requestAnimationFrame(() => this.draw()); },

  x(time) { return GUTTER + (time - this.view[0]) / (this.view[1] - this.view[0]) * (this.canvas.clientWidth - GUTTER - 2); },

  at(x) {
    const time = this.view[0] + (x - GUTTER) / (this.canvas.clientWidth - GUTTER - 2) * (this.view[1] - this.view[0]);
    const device = this.shown().find((step) => step.device_begin <= time && time <= step.device_end);
    return device ?? this.shown().find((step) => step.receive_begin <= time && time <= step.launch_end) ?? null;
  },

  choose(step) {
    if (this.chosen === step) return;
    this.chosen = step;
    $("step-details").textContent = step === null ? "Point at a step, or use the arrow keys."
      : `Step ${step.index}: device ${duration(step.device_end - step.device_begin)}, host `
        + `${duration(step.launch_end - step.receive_begin + step.process_end - step.block_end)}, waited `
        + `${duration(step.block_end - step.block_begin)}, lead ${duration(step.lead_s)}`
        + (step.bubble_s > 0 ? `, bubble ${duration(step.bubble_s)}` : "");
    this.redraw();
  },

  draw() {
    this.frame = 0;
    const ready = prepared(this.canvas);
    if (!ready) return;
    if (this.goal && this.view !== this.goal) {
      const next = this.view.map((value, i) => value + (this.goal[i] - value) * 0.35);
      const rest = Math.abs(next[0] - this.goal[0]) / (this.goal[1] - this.goal[0]);
      this.view = rest < 0.002 ? this.goal : next;
      if (this.view !== this.goal) this.redraw();
    }
    new LaneDrawing(ready, this).all();
    const shown = this.shown();
    $("step-range").textContent = shown.length ? `${shown[0].index} – ${shown.at(-1).index}` : "none yet";
    this.canvas.dataset.last = shown.at(-1)?.index ?? "";
  },
};

/** One drawing of the lanes. */
class LaneDrawing {
  constructor({ context, width, height }, source) {
    Object.assign(this, { context, width, height, source });
    this.colors = Object.fromEntries(
      ["even", "odd", "wait", "bubble", "window", "grid", "lane", "dim", "on-step"].map((name) => [name, color(name)]));
    const axis = 20, gap = Math.max(12, height * 0.13), tall = (height - axis - gap - 8) / 2;
    this.host = { y: 4, height: tall };
    this.device = { y: 4 + tall + gap, height: tall };
    this.axis = height - 5;
  }

  all() {
    this.background();
    const shown = this.source.shown();
    this.context.save();
    this.context.beginPath();
    this.context.rect(GUTTER, 0, this.width - GUTTER, this.height);
    this.context.clip();
    if (shown.length) this.ticks();
    // A step before the first shown may still lie in view: drawn too, so that the left edge is not empty.
    const from = Math.max(0, this.source.steps.length - shown.length - 3);
    const drawn = this.source.steps.slice(from);
    drawn.forEach((step, i) => this.bubble(step, drawn[i - 1]));
    for (const step of drawn) this.step(step);
    this.context.restore();
  }

  background() {
    const { context, colors } = this;
    context.font = "600 12px system-ui, sans-serif";
    context.textBaseline = "middle";
    for (const [name, lane] of [["Host", this.host], ["Device", this.device]]) {
      context.fillStyle = colors.lane;
      this.box(GUTTER, this.width - 1, lane.y, lane.height, 6);
      context.fillStyle = colors.dim;
      context.fillText(name, 0, lane.y + lane.height / 2);
    }
  }

  ticks() {
    const { context, colors, source } = this;
    const span = source.view[1] - source.view[0], rough = span / Math.max(2, this.width / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((times) => times * power).find((size) => size >= rough);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "alphabetic";
    context.textAlign = "left";
    for (let at = 0; at < span; at += step) {
      const x = Math.round(source.x(source.view[0] + at)) + 0.5;
      context.strokeStyle = colors.grid;
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, this.height - 14);
      context.stroke();
      const label = at ? duration(at) : "0";
      context.fillStyle = colors.dim;
      if (x + 3 + context.measureText(label).width < this.width) context.fillText(label, x + 3, this.axis);
    }
  }

  step(step) {
    const { host, device, colors } = this, tone = colors[step.index % 2 ? "odd" : "even"];
    const chosen = this.source.chosen;
    this.context.globalAlpha = chosen && chosen !== step ? 0.3 : 1;
    this.window(step);
    this.piece(step.receive_begin, step.schedule_begin, host, tone, 0.3);
    this.piece(step.schedule_begin, step.launch_begin, host, tone, 0.6);
    this.piece(step.launch_begin, step.launch_end, host, tone, 1);
    this.wait(step);
    this.piece(step.block_end, step.process_end, host, tone, 0.6);
    this.link(step, tone);
    this.piece(step.device_begin, step.device_end, device, tone, 1, String(step.index));
    this.context.globalAlpha = 1;
  }

  piece(begin, end, lane, tone, strength, label) {
    const { context, source } = this, x = source.x(begin), wide = Math.max(source.x(end) - x, 0.75);
    if (x > this.width || x + wide < GUTTER) return;
    const alpha = context.globalAlpha;
    context.globalAlpha = alpha * strength;
    context.fillStyle = tone;
    this.box(x, x + wide - (wide > 3 ? 0.75 : 0), lane.y, lane.height, Math.min(4, wide / 3));
    context.globalAlpha = alpha;
    const left = Math.max(x, GUTTER), right = Math.min(x + wide, this.width);
    if (label && right - left > 7 + 7 * label.length) {
      context.fillStyle = this.colors["on-step"];
      context.font = "600 11.5px system-ui, sans-serif";
      context.textAlign = "center";
      context.textBaseline = "middle";
      context.fillText(label, (left + right) / 2, lane.y + lane.height / 2 + 0.5);
    }
  }

  wait(step) {
    const { host, source, context } = this, x = source.x(step.block_begin), end = source.x(step.block_end);
    if (end - x < 1) return;
    context.fillStyle = this.colors.wait;
    this.box(x, end, host.y + host.height / 2 - 2, 4, 2);
  }

  /** The part of the step in which the host worked for free. */
  window(step) {
    const { source, context, host } = this;
    if (!(step.window_s > 0)) return;
    const x = source.x(step.launch_end), end = source.x(step.launch_end + step.window_s);
    context.fillStyle = this.colors.window;
    this.box(x + 0.5, Math.max(end - 0.5, x + 1), host.y + host.height + 3, 3, 1.5);
  }

  /** From the launch on the host to the work on the device. */
  link(step, tone) {
    const { source, context, host, device } = this, a = source.x(step.launch_end), b = source.x(step.device_begin);
    const top = host.y + host.height, bottom = device.y, middle = (top + bottom) / 2;
    context.strokeStyle = tone;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(a, top);
    context.bezierCurveTo(a, middle + 4, b, middle - 4, b, bottom);
    context.stroke();
  }

  bubble(step, before) {
    if (!before || !(step.bubble_s > 0)) return;
    const { source, context, device } = this, x = source.x(before.device_end), end = source.x(step.device_begin);
    if (end - x < 0.5) return;
    context.fillStyle = this.colors.bubble;
    context.globalAlpha = 0.85;
    this.box(x, end, device.y + device.height - 5, 5, 2);
    context.globalAlpha = 0.16;
    this.box(x, end, device.y, device.height, 0);
    context.globalAlpha = 1;
  }

  box(x, end, y, height, radius) {
    this.context.beginPath();
    this.context.roundRect(x, y, Math.max(end - x, 0), height, radius);
    this.context.fill();
  }
}
