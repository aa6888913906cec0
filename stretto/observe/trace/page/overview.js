// The strip above the timeline: the whole trace, computing and lost time, and a window that can be dragged.

class Overview {
  constructor(timeline) {
    this._timeline = timeline;
    this._canvas = document.getElementById("overview");
    this._image = null;
    const move = (event) => {
      const middle = ((event.offsetX - GUTTER) / this._width) * timeline.trace.length;
      timeline.show(middle - timeline.range / 2, middle + timeline.range / 2);
    };
    this._canvas.addEventListener("pointerdown", (event) => {
      this._canvas.setPointerCapture(event.pointerId);
      this._dragging = true;
      move(event);
    });
    this._canvas.addEventListener("pointermove", (event) => { if (this._dragging) move(event); });
    this._canvas.addEventListener("pointerup", () => { this._dragging = false; });
    timeline.theme.onChange(() => { this._image = null; });
  }

  get _width() { return this._canvas.clientWidth - GUTTER; }

  resize(width, ratio) {
    this._canvas.width = width * ratio;
    this._canvas.height = 44 * ratio;
    this._image = null;
  }

  forget() { this._image = null; }

  draw() {
    const t = this._timeline, c = this._canvas.getContext("2d"), ratio = devicePixelRatio || 1, width = this._canvas.clientWidth;
    if (!this._image) this._image = this._paint(width, ratio);
    c.setTransform(1, 0, 0, 1, 0, 0);
    c.drawImage(this._image, 0, 0);
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    const a = GUTTER + (t.begin / t.trace.length) * this._width, b = GUTTER + (t.end / t.trace.length) * this._width;
    c.fillStyle = t.theme.card;
    c.globalAlpha = 0.66;
    c.fillRect(GUTTER, 0, a - GUTTER, 44);
    c.fillRect(b, 0, width - b, 44);
    c.globalAlpha = 1;
    c.strokeStyle = t.theme.ink;
    c.lineWidth = 1.5;
    c.strokeRect(a, 1, Math.max(b - a, 3), 42);
  }

  // Per pixel column: the share of time lost to each cause, stacked, over the share computing.
  _paint(width, ratio) {
    const t = this._timeline, theme = t.theme, columns = Math.max(1, Math.floor(this._width));
    const image = new OffscreenCanvas(Math.max(1, width * ratio), 44 * ratio), c = image.getContext("2d");
    c.scale(ratio, ratio);
    c.fillStyle = theme.card;
    c.fillRect(0, 0, width, 44);
    c.fillStyle = theme.gutter;
    c.fillRect(0, 0, GUTTER - 1, 44);
    c.fillStyle = theme.ink;
    c.font = "600 12px system-ui, sans-serif";
    c.textBaseline = "middle";
    c.fillText("whole trace", 14, 22);
    const scale = columns / t.trace.length, causes = theme.causes.length;
    const lost = new Float32Array(columns * causes), row = t.device.gaps;
    for (let i = 0; i < row.n; i++) {
      let a = row.start[i] * scale;
      const b = row.end[i] * scale;
      while (a < b) {
        const column = Math.min(columns - 1, Math.floor(a)), stop = Math.min(b, column + 1);
        lost[column * causes + row.mark[i]] += stop - a;
        if (stop <= a) break;
        a = stop;
      }
    }
    const first = t.device.begin * scale, last = t.device.end * scale;
    for (let column = 0; column < columns; column++) {
      if (column + 1 < first || column > last) continue;
      let y = 38;
      for (let cause = 0; cause < causes; cause++) {
        const share = lost[column * causes + cause];
        if (!share) continue;
        const height = Math.min(y - 6, share * 32);
        c.fillStyle = theme.causes[cause];
        c.fillRect(GUTTER + column, y - height, 1.2, height);
        y -= height;
      }
      c.fillStyle = theme.compute;
      c.globalAlpha = 0.55;
      c.fillRect(GUTTER + column, 6, 1.2, y - 6);
      c.globalAlpha = 1;
    }
    return image;
  }
}
