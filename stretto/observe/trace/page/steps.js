// The table of steps: sorts, and draws only the rows in view, so that it takes any number of them.

const STEP_ROW = 28;
const STEP_COLUMNS = [
  ["step", "The label of the step"], ["begins", "When its first work begins on the device"],
  ["length", "To the begin of the next step"], ["busy", "Share of it in which the device was busy"],
  ["window", "From the end of its launch to the first block of the host"], ["where the time went", "Computing, and lost by cause"],
  ["most lost to", "The cause that cost most"],
];

class StepTable {
  constructor(trace, theme, onShow) {
    Object.assign(this, { _trace: trace, _theme: theme, _onShow: onShow, _sort: 0, _down: false, chosen: -1 });
    this._scroll = document.getElementById("steps-scroll");
    this._body = document.getElementById("steps-body");
    const head = document.getElementById("steps-head");
    STEP_COLUMNS.forEach(([name, note], column) => {
      const cell = make("span"), button = make("button", "", name);
      button.title = note;
      button.addEventListener("click", () => {
        this._down = this._sort === column ? !this._down : column > 0;
        this._sort = column;
        this._order();
      });
      cell.append(button);
      head.append(cell);
    });
    this._scroll.addEventListener("scroll", () => this._draw());
    theme.onChange(() => this._device && this._draw());
  }

  show(device) {
    this._device = device;
    document.getElementById("steps-hint").textContent = `${device.steps.labels.length} found by ${device.steps.method} · click to see one above`;
    document.getElementById("steps-spacer").style.height = `${device.steps.labels.length * STEP_ROW}px`;
    this._scroll.style.height = `${Math.min(364, Math.max(1, device.steps.labels.length) * STEP_ROW)}px`;
    this._order();
  }

  _order() {
    const { rows, start } = this._device.steps;
    const key = [
      (i) => i, (i) => start[i], (i) => rows[i][0], (i) => rows[i][1] / (rows[i][0] || 1), (i) => rows[i][2],
      (i) => rows[i][0] - rows[i][1], (i) => (rows[i][3][0] ? rows[i][3][0][1] : 0),
    ][this._sort];
    const sign = this._down ? -1 : 1;
    this._indices = rows.map((_, i) => i).sort((a, b) => sign * (key(a) - key(b)) || a - b);
    this._draw();
  }

  _draw() {
    const first = Math.max(0, Math.floor(this._scroll.scrollTop / STEP_ROW) - 4);
    const last = Math.min(this._indices.length, first + Math.ceil(this._scroll.clientHeight / STEP_ROW) + 8);
    this._body.style.top = `${first * STEP_ROW}px`;
    this._body.replaceChildren(...this._indices.slice(first, last).map((i) => this._row(i)));
  }

  _row(i) {
    const { rows, start, labels } = this._device.steps, [length, busy, window_, lost] = rows[i];
    const line = make("div", i === this.chosen ? "row chosen" : "row");
    const share = length ? (100 * busy) / length : 0;
    const texts = [labels[i], duration(start[i]), duration(length * 1e3), `${share.toFixed(1)} %`, window_ < 0 ? "–" : duration(window_ * 1e3)];
    line.append(...texts.map((text) => make("span", "", text)));
    const bar = make("div", "mini"), gone = lost.reduce((sum, [, us]) => sum + us, 0);
    const piece = (colour, us) => { const part = make("i"); part.style.background = colour; part.style.width = `${(100 * us) / (length || 1)}%`; bar.append(part); };
    piece(this._theme.compute, Math.max(0, length - gone));
    for (const [cause, us] of lost) piece(this._theme.causes[cause], us);
    const worst = make("span");
    if (lost.length && lost[0][1] > 0.002 * length) {
      const dot = make("i", "dot");
      dot.style.background = this._theme.causes[lost[0][0]];
      worst.append(dot, ` ${this._trace.meta.causes[lost[0][0]][1]}`);
    }
    line.append(bar, worst);
    line.addEventListener("click", () => {
      this.chosen = i;
      this._draw();
      const end = i + 1 < start.length ? start[i + 1] : this._device.end;
      this._onShow(start[i], end);
    });
    return line;
  }
}
