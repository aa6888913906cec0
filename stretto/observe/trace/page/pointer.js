// What pointer and keys do to the timeline: zoom, pan, select a range, show what is under the pointer, choose it.

class Pointer {
  constructor(timeline) {
    this._timeline = timeline;
    this._tip = document.getElementById("tip");
    this.marking = null;
    this._from = null;
    const canvas = timeline.canvas;
    canvas.addEventListener("wheel", (event) => this._wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this._down(event));
    canvas.addEventListener("pointermove", (event) => this._move(event));
    canvas.addEventListener("pointerup", (event) => this._up(event));
    canvas.addEventListener("pointercancel", () => { this._from = this.marking = null; });
    canvas.addEventListener("pointerleave", () => { this._tip.hidden = true; });
    canvas.addEventListener("dblclick", (event) => this._double(event));
    canvas.addEventListener("keydown", (event) => this._key(event));
    document.getElementById("in").addEventListener("click", () => timeline.zoom(0.5));
    document.getElementById("out").addEventListener("click", () => timeline.zoom(2));
    document.getElementById("all").addEventListener("click", () => timeline.show(0, timeline.trace.length));
  }

  // What is drawn at a place of the canvas: { lane, row, i, y, height }, or null.
  find(x, y) {
    const t = this._timeline, at = y - RULER + t.scroll.scrollTop;
    if (x < GUTTER || y < RULER) return null;
    const time = t.time(x), slack = (2 * t.range) / t.width;
    for (const lane of t.lanes.all) {
      for (const place of lane.rows) {
        if (at < place.y || at > place.y + place.height) continue;
        const i = place.row.at(time, 0) >= 0 ? place.row.at(time, 0) : place.row.at(time, slack);
        if (i >= 0) return { lane, row: place.row, i, y: place.y, height: place.height };
      }
    }
    return null;
  }

  _wheel(event) {
    event.preventDefault();
    const t = this._timeline;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) return t.pan((event.deltaX || event.deltaY) / t.width);
    t.zoom(Math.exp(Math.max(-240, Math.min(240, event.deltaY)) * 0.0022), t.time(Math.max(event.offsetX, GUTTER)));
  }

  _down(event) {
    const t = this._timeline;
    t.canvas.setPointerCapture(event.pointerId);
    this._tip.hidden = true;
    this._from = { x: event.offsetX, y: event.offsetY, begin: t.begin, top: t.scroll.scrollTop, moved: false };
    if (event.offsetY < RULER && event.offsetX > GUTTER) this.marking = [event.offsetX, event.offsetX];
    t.canvas.classList.add("dragging");
  }

  _move(event) {
    const t = this._timeline, from = this._from;
    if (!from) return this._hover(event);
    const dx = event.offsetX - from.x, dy = event.offsetY - from.y;
    if (Math.abs(dx) + Math.abs(dy) > 3) from.moved = true;
    if (!from.moved) return;
    if (this.marking) this.marking[1] = event.offsetX;
    else {
      const begin = from.begin - (dx / t.width) * t.range;
      t.scroll.scrollTop = from.top - dy;
      t.show(begin, begin + t.range);
    }
    t.redraw();
  }

  _up(event) {
    const t = this._timeline, from = this._from, marking = this.marking;
    this._from = this.marking = null;
    t.canvas.classList.remove("dragging");
    if (marking && from.moved) return t.show(t.time(Math.min(...marking)), t.time(Math.max(...marking)));
    if (from && !from.moved) this._click(event.offsetX, event.offsetY);
    t.redraw();
  }

  _click(x, y) {
    const t = this._timeline;
    if (x < GUTTER && y > RULER) {
      const at = y - RULER + t.scroll.scrollTop;
      const lane = t.lanes.all.find((one) => at >= one.y - 2 && at <= one.y + one.height + 2);
      if (lane) t.lanes.toggle(lane);
      return t.resize();
    }
    t.selected = this.find(x, y);
    t.onSelect(t.selected);
  }

  _double(event) {
    const found = this.find(event.offsetX, event.offsetY);
    if (!found) return;
    const { row, i } = found, length = Math.max(row.end[i] - row.start[i], 1);
    this._timeline.show(row.start[i] - 0.35 * length, row.end[i] + 0.35 * length);
  }

  _hover(event) {
    const t = this._timeline, found = this.find(event.offsetX, event.offsetY);
    t.canvas.style.cursor = found ? "pointer" : event.offsetY < RULER ? "col-resize" : event.offsetX < GUTTER ? "pointer" : "";
    this._tip.hidden = !found;
    if (!found) return;
    const { lane, row, i } = found;
    const title = document.createElement("b"), more = document.createElement("span");
    title.textContent = shortName(t.lanes.name(lane, row, i));
    more.textContent = `${duration(row.end[i] - row.start[i])} · ${lane.name}`;
    if (lane.kind === "gaps" && row.id[i] >= 0) more.textContent += ` · ${t.trace.stack(row.id[i])[0] || ""}`;
    this._tip.replaceChildren(title, more);
    const box = t.scroll.parentElement.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    this._tip.style.left = `${Math.max(4, Math.min(x + 14, box.width - this._tip.offsetWidth - 6))}px`;
    this._tip.style.top = `${Math.max(4, Math.min(y + 18, box.height - this._tip.offsetHeight - 6))}px`;
  }

  _key(event) {
    const t = this._timeline;
    const does = {
      w: () => t.zoom(0.7), s: () => t.zoom(1.43), a: () => t.pan(-0.15), d: () => t.pan(0.15),
      ArrowLeft: () => t.pan(-0.15), ArrowRight: () => t.pan(0.15), "+": () => t.zoom(0.7), "-": () => t.zoom(1.43),
      0: () => t.show(0, t.trace.length),
    }[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!does || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    does();
  }
}
