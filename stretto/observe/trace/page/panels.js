// Everything around the timeline but the steps: verdict, figures, findings, details. Text only ever enters as text.

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

// Text in which `code` is set as code.
function withCode(tag, className, text) {
  const element = make(tag, className);
  text.split("`").forEach((part, i) => part && element.append(i % 2 ? make("code", "", part) : part));
  return element;
}

class Panels {
  constructor(trace, theme, onShow) {
    Object.assign(this, { _trace: trace, _theme: theme, _onShow: onShow });
    theme.onChange(() => this._device && this.show(this._device));
  }

  show(device) {
    this._device = device;
    document.getElementById("verdict").textContent = device.verdict;
    this._share(device);
    const figures = device.figures.map(([label, value, note]) => {
      const card = make("div", "card");
      card.title = note;
      card.append(make("small", "", label), make("b", "", value), make("small", "", note));
      return card;
    });
    document.getElementById("figures").replaceChildren(...figures);
    const findings = device.findings.map((finding) => this._finding(device, finding));
    const good = make("li", "good", "Nothing kept the device waiting, and no hidden sync was found.");
    document.getElementById("findings").replaceChildren(...(findings.length ? findings : [good]));
  }

  _share(device) {
    const whole = Math.max(1, device.end - device.begin), theme = this._theme;
    const parts = [[theme.compute, "computing", device.compute], ...device.idle.map(([cause, length]) => [
      theme.causes[cause], this._trace.meta.causes[cause][1], length,
    ])];
    const bar = document.getElementById("share"), legend = document.getElementById("legend");
    bar.replaceChildren(...parts.map(([colour, name, length]) => {
      const piece = make("i");
      piece.style.background = colour;
      piece.style.flex = `${length / whole} 1 0`;
      piece.title = `${name} ${((100 * length) / whole).toFixed(1)} %`;
      return piece;
    }));
    bar.setAttribute("aria-label", parts.map(([, name, length]) => `${name} ${((100 * length) / whole).toFixed(1)} %`).join(", "));
    legend.replaceChildren(...parts.filter(([, , length]) => length >= 0.001 * whole).map(([colour, name, length]) => {
      const item = make("span"), dot = make("i", "dot");
      dot.style.background = colour;
      item.append(dot, make("span", "", `${name} `), make("b", "", `${((100 * length) / whole).toFixed(1)} %`));
      return item;
    }));
  }

  _finding(device, finding) {
    const steps = Math.max(1, device.steps.labels.length), whole = Math.max(1, device.end - device.begin);
    const item = make("li"), card = make("button", "finding"), head = make("h3");
    card.style.setProperty("--c", this._theme.causes[finding.cause]);
    if (finding.severity) head.append(make("span", "badge", finding.severity));
    head.append(withCode("span", "", finding.title));
    card.append(head);
    if (finding.location) card.append(make("p", "where mono", `at ${finding.location}${finding.line}`));
    const around = finding.stack.filter((name) => name !== finding.location).slice(0, 4);
    if (around.length) card.append(make("p", "mono dim", around.map(shortName).join(" ‹ ")));
    if (finding.remedy) card.append(withCode("p", "", `Fix: ${finding.remedy}`));
    const aside = make("aside");
    if (finding.gain) {
      aside.append(make("b", "", `${(whole / Math.max(1, whole - finding.gain)).toFixed(2)}× faster`));
      aside.append(make("div", "dim", `without it: ${duration(finding.gain / steps)} a step less`));
    } else aside.append(make("b", "", `${((100 * finding.idle) / whole).toFixed(1)} % idle`));
    aside.append(make("div", "dim", `${finding.count.toLocaleString("en")} times, device idle ${duration(finding.idle / steps)} a step`));
    if (finding.blocked) aside.append(make("div", "dim", `host blocked ${duration(finding.blocked / steps)} a step`));
    card.append(aside);
    if (finding.at) card.addEventListener("click", () => this._onShow(finding.at[0], finding.at[1]));
    item.append(card);
    return item;
  }

  details(chosen, timeline) {
    const box = document.getElementById("details");
    box.hidden = !chosen;
    if (!chosen) return;
    const { lane, row, i } = chosen, maps = this._trace.maps();
    const facts = make("ol"), frames = make("ol", "mono");
    const fact = (label, value) => { const line = make("li"); line.append(make("span", "dim", `${label}  `), make("span", "", value)); facts.append(line); };
    fact("lane", lane.name);
    fact("begins", duration(row.start[i]));
    fact("takes", duration(row.end[i] - row.start[i]));
    let span = lane.kind === "stream" ? maps.launchOf.get(row.id[i]) : row.id[i];
    const severity = lane.kind === "thread" ? row.mark[i] >> 4 : 0;
    if (severity) fact("blocking call", this._trace.meta.severities[severity - 1]);
    const other = lane.kind === "gaps" ? null : timeline.counterpart(chosen);
    if (other && lane.kind === "stream") fact("launched", `${duration(row.start[i] - other.row.start[other.i])} before it began`);
    if (other && lane.kind === "thread") fact("launches", shortName(timeline.lanes.name(other.lane, other.row, other.i)));
    const stack = span === undefined ? [] : this._trace.stack(span);
    for (const name of stack.slice(0, 14)) frames.append(make("li", "", shortName(name)));
    if (!stack.length) frames.append(make("li", "dim", "no stack was recorded"));
    box.style.borderLeftColor = timeline.lanes.colour(lane, row, i);
    box.replaceChildren(make("h3", "", shortName(timeline.lanes.name(lane, row, i))), facts, frames);
  }
}
