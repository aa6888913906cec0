// The timeline: draws lanes for a range of time, zooms, pans, selects. Knows pixels; asks Lanes for colours and names.

const LEAST_RANGE = 200;

class Timeline {
  constructor(trace, device, lanes, theme, onSelect) {
    Object.assign(this, { trace, device, lanes, theme, onSelect });
    this.canvas = document.getElementById("timeline");
    this.scroll = document.getElementById("scroll");
    this.begin = 0;
    this.end = trace.length;
    this.selected = null;
    this.frames = 0;
    this._pending = false;
    theme.onChange(() => this.redraw());
    new ResizeObserver(() => this.resize()).observe(this.scroll.parentElement);
    this.scroll.addEventListener("scroll", () => this.redraw());
    this.margins = new Margins(this);
    this.overview = new Overview(this);
    this.pointer = new Pointer(this);
    this.resize();
  }

  get width() { return this.canvas.clientWidth - GUTTER; }
  get range() { return this.end - this.begin; }
  x(time) { return GUTTER + ((time - this.begin) / this.range) * this.width; }
  time(x) { return this.begin + ((x - GUTTER) / this.width) * this.range; }

  show(begin, end) {
    const length = Math.min(Math.max(end - begin, LEAST_RANGE), this.trace.length);
    const middle = (begin + end) / 2;
    this.begin = Math.min(Math.max(middle - length / 2, 0), this.trace.length - length);
    this.end = this.begin + length;
    this.redraw();
  }

  zoom(factor, at = this.begin + this.range / 2) {
    const length = Math.min(Math.max(this.range * factor, LEAST_RANGE), this.trace.length);
    const begin = at - ((at - this.begin) / this.range) * length;
    this.show(begin, begin + length);
  }

  pan(share) { this.show(this.begin + this.range * share, this.end + this.range * share); }

  resize() {
    const ratio = devicePixelRatio || 1, width = this.scroll.parentElement.clientWidth;
    const total = this.lanes.height + RULER;
    document.getElementById("spacer").style.height = `${total}px`;
    const height = Math.min(total, Math.max(200, Math.min(innerHeight * 0.62, 640)));
    this.canvas.style.height = `${height}px`;
    this.canvas.width = this.scroll.clientWidth * ratio;
    this.canvas.height = height * ratio;
    this.overview.resize(width, ratio);
    this.redraw();
  }

  redraw() {
    if (this._pending) return;
    this._pending = true;
    requestAnimationFrame(() => {
      this._pending = false;
      this.draw();
      this.frames++;
    });
  }

  draw() {
    const ratio = devicePixelRatio || 1, c = this.canvas.getContext("2d"), theme = this.theme;
    const width = this.canvas.clientWidth, height = this.canvas.clientHeight, top = RULER - this.scroll.scrollTop;
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.fillStyle = theme.lane;
    c.fillRect(0, 0, width, height);
    c.font = "11px ui-monospace, Menlo, Consolas, monospace";
    c.textBaseline = "middle";
    c.save();
    c.beginPath();
    c.rect(GUTTER, RULER, width - GUTTER, height - RULER);
    c.clip();
    this._steps(c, height);
    this._bands(c, height);
    for (const lane of this.lanes.all) {
      if (lane.y + lane.height + top < RULER || lane.y + top > height) continue;
      for (const { row, y, height: tall } of lane.rows) this._row(c, lane, row, y + top, tall);
    }
    this._arrow(c, top);
    c.restore();
    this.margins.gutter(c, top, height);
    this.margins.ruler(c, width);
    this.overview.draw();
    document.getElementById("range").textContent = `${duration(this.range)} of ${duration(this.trace.length)}`;
  }

  // The level of a row that draws about one span per pixel; null: the row itself.
  _level(row) {
    const pixel = this.range / this.width;
    let chosen = null;
    for (const level of row.levels()) if (level.width <= 2 * pixel) chosen = level;
    return chosen;
  }

  _row(c, lane, row, y, height) {
    const level = this._level(row);
    if (level) return this._coarse(c, lane, row, level, y, height);
    const last = this.time(GUTTER + this.width);
    let drawn = -1;
    for (let i = row.after(this.begin); i < row.n && row.start[i] < last; i++) {
      const a = Math.max(this.x(row.start[i]), GUTTER - 2), b = Math.min(this.x(row.end[i]), GUTTER + this.width + 2);
      const w = b - a;
      if (w < 0.7 && Math.floor(a) === drawn) continue;
      drawn = Math.floor(a);
      c.fillStyle = this.lanes.colour(lane, row, i);
      if (w > 5) {
        c.beginPath();
        c.roundRect(a + 0.4, y, w - 0.8, height, Math.min(3, w / 4));
        c.fill();
      } else c.fillRect(a, y, Math.max(w, 0.7), height);
      if (w > 34) this._label(c, lane, row, i, a, w, y, height);
      const chosen = this.selected;
      if (chosen && chosen.row === row && chosen.i === i) {
        c.strokeStyle = this.theme.ink;
        c.lineWidth = 2;
        c.strokeRect(a, y, Math.max(w, 2), height);
      }
    }
  }

  _coarse(c, lane, row, level, y, height) {
    let low = 0, high = level.n;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (level.end[middle] <= this.begin) low = middle + 1; else high = middle;
    }
    for (let i = low; i < level.n && level.start[i] < this.end; i++) {
      const a = this.x(level.start[i]), w = Math.max(this.x(level.end[i]) - a, 0.7);
      c.globalAlpha = 0.25 + 0.75 * Math.min(1, level.used[i] / Math.max(1, level.end[i] - level.start[i]));
      c.fillStyle = this.lanes.colour(lane, row, level.first[i]);
      c.fillRect(a, y, w, height);
    }
    c.globalAlpha = 1;
  }

  _label(c, lane, row, i, a, w, y, height) {
    let text = shortName(this.lanes.name(lane, row, i));
    const room = Math.floor((w - 10) / 6.7);
    if (lane.kind === "gaps" && w > 150) text += `  ${duration(row.end[i] - row.start[i])}`;
    if (room < 3) return;
    if (text.length > room) text = `${text.slice(0, room - 1)}…`;
    const strong = lane.kind === "gaps" || row.mark[i] >> 4 === 1;
    const vivid = lane.kind === "gaps" || (lane.kind === "thread" && row.mark[i] >> 4 && row.mark[i] >> 4 < 3);
    c.fillStyle = vivid ? this.theme.onVivid(c.fillStyle) : this.theme.onSpan;
    c.font = `${strong ? "600 " : ""}11px ui-monospace, Menlo, Consolas, monospace`;
    c.fillText(text, Math.max(a, GUTTER) + 5, y + height / 2 + 0.5);
  }

  // Every second step is shaded.
  _steps(c, height) {
    const { start } = this.device.steps, n = start.length;
    if (n < 2 || (this.range / (start[n - 1] - start[0])) * n > this.width / 6) return;
    c.fillStyle = this.theme.shade;
    for (let i = lowerBound(start, this.begin) - 1; i < n && (i < 0 || start[i] < this.end); i++) {
      if (i < 0 || i % 2) continue;
      const a = this.x(start[i]), b = this.x(i + 1 < n ? start[i + 1] : this.device.end);
      c.fillRect(a, 0, b - a, height);
    }
  }

  // Gaps tint everything below them: what was the host doing just then?
  _bands(c, height) {
    const row = this.device.gaps;
    if (row.after(this.end) - row.after(this.begin) > 2 * this.width) return; // none would be as wide as a pixel
    c.globalAlpha = this.theme.dark ? 0.16 : 0.11;
    for (let i = row.after(this.begin); i < row.n && row.start[i] < this.end; i++) {
      const a = this.x(row.start[i]), w = this.x(row.end[i]) - a;
      if (w < 2) continue;
      c.fillStyle = this.theme.causes[row.mark[i]];
      c.fillRect(a, RULER, w, height);
    }
    c.globalAlpha = 1;
  }

  // From the launching call to the first activity of the chosen item.
  _arrow(c, top) {
    const chosen = this.selected;
    if (!chosen || chosen.lane.kind === "gaps") return;
    const other = this.counterpart(chosen);
    if (!other) return;
    const [from, to] = chosen.lane.kind === "thread" ? [chosen, other] : [other, chosen];
    const x1 = this.x(from.row.start[from.i]), y1 = from.y + top + from.height / 2;
    const x2 = this.x(to.row.start[to.i]), y2 = to.y + top + to.height / 2;
    c.strokeStyle = this.theme.ink;
    c.lineWidth = 1.5;
    c.beginPath();
    c.moveTo(x1, y1);
    c.bezierCurveTo(x1 + 30, y1, x2 - 30, y2, x2, y2);
    c.stroke();
    c.beginPath();
    c.arc(x2, y2, 3, 0, 7);
    c.fillStyle = this.theme.ink;
    c.fill();
  }

  counterpart({ lane, row, i }) {
    const maps = this.trace.maps();
    const wanted = lane.kind === "thread" ? maps.launched.get(row.id[i]) : maps.launchOf.get(row.id[i]);
    if (wanted === undefined) return null;
    for (const other of this.lanes.all) {
      if (other.kind !== (lane.kind === "thread" ? "stream" : "thread")) continue;
      for (const place of other.rows) {
        const found = place.row.id.indexOf(wanted);
        if (found >= 0) return { lane: other, row: place.row, i: found, y: place.y, height: place.height };
      }
    }
    return null;
  }
}

function shortName(name) {
  return name.replace(/^void /, "").replace(/\(anonymous namespace\)::/g, "").replace(/^stretto\.(?!step)/, "");
}

function lowerBound(values, wanted) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low;
}
