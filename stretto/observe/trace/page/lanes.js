// Which lanes the timeline shows, in what order, and how each span is coloured and named.

const LANE_HEIGHT = 28, ROW_HEIGHT = 20, LANE_SPACE = 10;

class Lanes {
  constructor(trace, device, theme) {
    this._trace = trace;
    this._theme = theme;
    this._open = new Set();
    this.show(device);
  }

  show(device) {
    this._device = device;
    this._layout();
  }

  toggle(lane) {
    if (!lane.thread) return;
    const key = lane.thread.thread;
    if (this._open.has(key)) this._open.delete(key); else this._open.add(key);
    this._layout();
  }

  _layout() {
    const lanes = [];
    let y = 4;
    const add = (lane, height, rows) => {
      lanes.push({ ...lane, y, height, rows: rows.map((row, i) => ({ row, y: y + i * ROW_HEIGHT, height: lane.tall ? height : ROW_HEIGHT - 1 })) });
      y += height + LANE_SPACE;
    };
    add({ kind: "gaps", name: "not computing", note: "by cause", tall: true }, 32, [this._device.gaps]);
    for (const lane of this._device.lanes) add({ kind: "stream", name: lane.name, note: this._device.name, tall: true }, LANE_HEIGHT + 4, lane.rows);
    for (const thread of this._trace.threads) {
      const open = this._open.has(thread.thread);
      const rows = open ? thread.rows : this._summary(thread);
      if (!rows.length) continue;
      const note = thread.thread === this._device.thread ? "launches · click for all" : "click for all";
      add({ kind: "thread", name: thread.name, note: open ? "click for less" : note, thread, open }, rows.length * ROW_HEIGHT, rows);
    }
    this.all = lanes;
    this.height = y + 4;
  }

  // A closed thread: its phases, then its calls into the device's runtime; without either, its outermost spans.
  _summary(thread) {
    if (thread.summary) return thread.summary;
    const rows = [];
    const annotations = thread.rows.map((row) => filterRow(row, (mark) => (mark & 15) === 0)).filter((row) => row.n);
    rows.push(...annotations.slice(0, 3));
    const calls = mergeRows(thread.rows, (mark) => (mark & 15) === 3 || mark >> 4 > 0 || (mark & 15) === 4);
    if (calls.n) rows.push(calls);
    if (!calls.n) {
      const others = thread.rows.map((row) => filterRow(row, (mark) => (mark & 15) === 2)).filter((row) => row.n);
      rows.push(...others.slice(0, 2));
    }
    return (thread.summary = rows.length ? rows : thread.rows.slice(0, 2));
  }

  colour(lane, row, i) {
    const theme = this._theme, mark = row.mark[i];
    if (lane.kind === "gaps") return theme.causes[mark];
    if (lane.kind === "stream") return mark === 0 || mark === 5 ? theme.kernel(row.name[i]) : theme.kinds[mark];
    return mark >> 4 ? theme.severities[(mark >> 4) - 1] : theme.host[mark & 15];
  }

  name(lane, row, i) {
    return lane.kind === "gaps" ? this._trace.meta.causes[row.mark[i]][1] : this._trace.names[row.name[i]];
  }
}

function filterRow(row, wanted) {
  const chosen = [];
  for (let i = 0; i < row.n; i++) if (wanted(row.mark[i])) chosen.push(i);
  return pickRow(chosen.map((i) => [row, i]));
}

// One row of the wanted spans of several: outer spans first, those inside another left out.
function mergeRows(rows, wanted) {
  const chosen = [];
  for (const row of rows) for (let i = 0; i < row.n; i++) if (wanted(row.mark[i])) chosen.push([row, i]);
  chosen.sort((a, b) => a[0].start[a[1]] - b[0].start[b[1]] || b[0].end[b[1]] - a[0].end[a[1]]);
  let reach = -1;
  return pickRow(chosen.filter(([row, i]) => {
    if (row.start[i] < reach) return false;
    reach = row.end[i];
    return true;
  }));
}

function pickRow(pairs) {
  const row = Object.create(Row.prototype);
  row.n = pairs.length;
  row.start = Float64Array.from(pairs, ([from, i]) => from.start[i]);
  row.end = Float64Array.from(pairs, ([from, i]) => from.end[i]);
  for (const column of ["name", "mark", "id"]) row[column] = Int32Array.from(pairs, ([from, i]) => from[column][i]);
  row._levels = null;
  return row;
}
