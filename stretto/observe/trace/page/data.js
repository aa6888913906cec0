// Unpacks the page's data: the meta object and the 32-bit columns that page_data.py wrote.

async function loadTrace() {
  const meta = JSON.parse(document.getElementById("meta").textContent);
  const text = document.getElementById("columns").textContent;
  const packed = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const columns = new Int32Array(await new Response(stream).arrayBuffer());
  return new Trace(meta, columns);
}

// Spans that do not overlap, in order of time. Times are ns.
class Row {
  constructor(columns, at, tick) {
    const n = at.n;
    this.n = n;
    this.start = new Float64Array(n);
    this.end = new Float64Array(n);
    let time = 0;
    for (let i = 0; i < n; i++) {
      time += columns[at.start + i];
      this.start[i] = time * tick;
      this.end[i] = (time + columns[at.length + i]) * tick;
    }
    this.name = columns.subarray(at.name, at.name + n);
    this.mark = columns.subarray(at.mark, at.mark + n);
    this.id = columns.subarray(at.id, at.id + n);
    this._levels = null;
  }

  // Index of the first span that ends after `time`.
  after(time) {
    let low = 0, high = this.n;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.end[middle] <= time) low = middle + 1; else high = middle;
    }
    return low;
  }

  at(time, slack) {
    const i = this.after(time - slack);
    return i < this.n && this.start[i] <= time + slack ? i : -1;
  }

  // Coarser copies of the row, each with spans merged into buckets four times as wide: a view draws about one per pixel.
  levels() {
    if (this._levels) return this._levels;
    this._levels = [];
    if (this.n < 4000) return this._levels;
    let finer = { start: this.start, end: this.end, used: null, first: null, n: this.n };
    let width = (this.end[this.n - 1] - this.start[0]) / this.n;
    while (finer.n > 1500) {
      width *= 4;
      const start = [], end = [], used = [], first = [];
      let bucket = -1;
      for (let i = 0; i < finer.n; i++) {
        const b = Math.floor(finer.start[i] / width);
        const length = finer.used ? finer.used[i] : finer.end[i] - finer.start[i];
        const index = finer.first ? finer.first[i] : i;
        if (b === bucket) {
          const k = start.length - 1;
          end[k] = Math.max(end[k], finer.end[i]);
          if (length > used[k] / 2) first[k] = index;
          used[k] += length;
        } else {
          bucket = b;
          start.push(finer.start[i]); end.push(finer.end[i]); used.push(length); first.push(index);
        }
      }
      finer = {
        start: Float64Array.from(start), end: Float64Array.from(end), used: Float64Array.from(used),
        first: Int32Array.from(first), n: start.length, width,
      };
      this._levels.push(finer);
    }
    return this._levels;
  }
}

class Trace {
  constructor(meta, columns) {
    Object.assign(this, { meta, names: meta.names, length: meta.length });
    const tick = meta.tick;
    const running = (at, n) => {
      const result = new Float64Array(n);
      let time = 0;
      for (let i = 0; i < n; i++) result[i] = (time += columns[at + i]) * tick;
      return result;
    };
    this.devices = meta.devices.map((device) => ({
      ...device,
      gaps: new Row(columns, device.gaps, tick),
      lanes: device.lanes.map((lane) => ({ ...lane, rows: lane.rows.map((row) => new Row(columns, row, tick)) })),
      steps: {
        ...device.steps,
        start: running(device.steps.start, device.steps.labels.length),
        host: running(device.steps.host, device.steps.labels.length),
      },
    }));
    this.threads = meta.threads.map((thread) => ({
      ...thread, rows: thread.rows.map((row) => new Row(columns, row, tick)),
    }));
    this._columns = columns;
    this._maps = null;
  }

  // Host span -> its parent and name, activity -> the span that launched it, and back. Made when first asked for.
  maps() {
    if (this._maps) return this._maps;
    const c = this._columns, { parents, launches, hostNames } = this.meta;
    const parent = new Map(), name = new Map(), launchOf = new Map(), launched = new Map(), place = new Map();
    for (let i = 0; i < parents.n; i++) {
      parent.set(c[parents.id + i], c[parents.parent + i]);
      name.set(c[parents.id + i], c[hostNames + i]);
    }
    for (let i = 0; i < launches.n; i++) {
      const activity = c[launches.activity + i], span = c[launches.span + i];
      launchOf.set(activity, span);
      if (!launched.has(span)) launched.set(span, activity);
    }
    return (this._maps = { parent, name, launchOf, launched, place });
  }

  stack(span) {
    const { parent, name } = this.maps();
    const frames = [];
    while (span !== undefined && span >= 0 && frames.length < 200) {
      if (name.has(span)) frames.push(this.names[name.get(span)]);
      span = parent.get(span);
    }
    return frames;
  }
}

function duration(ns) {
  const size = Math.abs(ns);
  if (size < 1e3) return `${Math.round(ns)} ns`;
  const [scale, unit] = size < 1e6 ? [1e3, "µs"] : size < 1e9 ? [1e6, "ms"] : [1e9, "s"];
  const value = ns / scale;
  return `${value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2)} ${unit}`;
}
