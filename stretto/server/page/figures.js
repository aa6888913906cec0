// The figures beside the lanes, from sums that the engine keeps anyway and from its last steps.

const RATE_SECONDS = 60;
const RATE_GUTTER = 44;

const figures = {
  history: [], // [engine time, tokens per second], oldest first
  before: null,

  start() { new ResizeObserver(() => this.plot()).observe($("rate-plot")); },

  /** `now` is the engine's clock. */
  take(now, stats) {
    if (this.before && now <= this.before.now) {
      this.history = [];
      this.before = null;
    }
    if (this.before && now - this.before.now < 0.15) return; // the same moment again: no rate can be made of it
    const last = this.before;
    this.before = { now, tokens: stats.output_tokens };
    if (last) this.history.push([now, Math.max(0, stats.output_tokens - last.tokens) / (now - last.now)]);
    while (this.history.length && this.history[0][0] < now - RATE_SECONDS) this.history.shift();
    this.show(now, stats);
    this.plot();
  },

  show(now, stats) {
    const steps = lanes.shown(), sum = (value) => steps.reduce((total, step) => total + value(step), 0);
    const busy = sum((step) => step.device_end - step.device_begin), bubbles = sum((step) => step.bubble_s);
    if (steps.length) {
      $("bubbles").textContent = `${(100 * bubbles / (busy + bubbles)).toFixed(1)} %`;
      $("window").textContent = duration(sum((step) => step.window_s) / steps.length);
      $("step-time").textContent = duration(busy / steps.length);
    }
    const recent = this.history.filter(([time]) => time > now - 1);
    const rate = recent.reduce((total, [, value]) => total + value, 0) / (recent.length || 1);
    $("rate").textContent = rate < 100 ? rate.toFixed(1) : Math.round(rate).toLocaleString("en");
    $("rate-phone").textContent = $("rate").textContent;
    $("running").textContent = stats.num_running;
    $("queued").textContent = stats.num_waiting;
    $("preempted").textContent = stats.preemptions ?? 0;
    $("running-note").textContent = stats.preemptions ? `requests, ${stats.preemptions} preempted` : "requests";
    const pages = stats.num_pages || 1, used = (pages - stats.num_free_pages) / pages;
    const kept = Math.min(stats.num_cached_pages ?? 0, stats.num_free_pages) / pages;
    $("cache").textContent = `${(100 * used).toFixed(used && used < 0.1 ? 1 : 0)} %`;
    $("cache-note").textContent = `in use, ${(100 * kept).toFixed(0)} % kept`;
    $("cache-used").style.width = `${100 * used}%`;
    $("cache-kept").style.width = `${100 * kept}%`;
    live.state(stats.num_running || stats.num_waiting ? "busy" : "idle", rate);
  },

  plot() {
    const ready = prepared($("rate-plot"));
    if (!ready || this.history.length < 2) return;
    const { context, width, height } = ready, now = this.history.at(-1)[0];
    const high = rounded(Math.max(1, ...this.history.map(([, value]) => value))), bottom = height - 18;
    const x = (time) => width - (width - RATE_GUTTER) * (now - time) / RATE_SECONDS;
    const y = (value) => bottom - (bottom - 8) * value / high;
    this.scale(context, width, high, x, y, now);
    context.beginPath();
    this.history.forEach(([time, value], i) => (i ? context.lineTo(x(time), y(value)) : context.moveTo(x(time), y(value))));
    context.strokeStyle = color("even");
    context.lineWidth = 1.75;
    context.lineJoin = "round";
    context.stroke();
    context.lineTo(width, bottom);
    context.lineTo(x(this.history[0][0]), bottom);
    context.globalAlpha = 0.13;
    context.fillStyle = color("even");
    context.fill();
    context.globalAlpha = 1;
  },

  /** Lines and numbers of both axes. */
  scale(context, width, high, x, y, now) {
    $("rate-plot").dataset.high = high;
    context.font = "11px system-ui, sans-serif";
    context.lineWidth = 1;
    context.strokeStyle = color("grid");
    context.fillStyle = color("dim");
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const value of [0, high / 2, high]) {
      const at = Math.round(y(value)) + 0.5;
      context.beginPath();
      context.moveTo(RATE_GUTTER, at);
      context.lineTo(width, at);
      context.stroke();
      context.fillText(value < 10_000 ? value : `${value / 1000}k`, RATE_GUTTER - 6, at);
    }
    context.textBaseline = "alphabetic";
    for (const [ago, align] of [[RATE_SECONDS, "left"], [RATE_SECONDS / 2, "center"], [0, "right"]]) {
      context.textAlign = align;
      context.fillText(ago ? `${ago} s ago` : "now", x(now - ago), y(0) + 15);
    }
  },
};

/** The next number up that people like to read: 1, 2 or 5 times a power of ten. */
function rounded(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((times) => times * power).find((size) => size >= value * 0.9999);
}
