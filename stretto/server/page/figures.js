// The figures beside the lanes, from sums that the engine keeps anyway and from its last steps.

const RATE_SECONDS = 60;

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
    const high = Math.max(1, ...this.history.map(([, value]) => value));
    const x = (time) => width * (1 - (now - time) / RATE_SECONDS), y = (value) => height - 2 - (height - 8) * value / high;
    context.beginPath();
    this.history.forEach(([time, value], i) => (i ? context.lineTo(x(time), y(value)) : context.moveTo(x(time), y(value))));
    context.strokeStyle = color("even");
    context.lineWidth = 1.75;
    context.lineJoin = "round";
    context.stroke();
    context.lineTo(width, height);
    context.lineTo(x(this.history[0][0]), height);
    context.globalAlpha = 0.13;
    context.fillStyle = color("even");
    context.fill();
    context.globalAlpha = 1;
  },
};
