// Puts the page together.

async function main() {
  const trace = await loadTrace(), theme = new Theme(trace.meta);
  const text = (id, value) => { document.getElementById(id).textContent = value; };
  let device = trace.devices[0];
  const lanes = new Lanes(trace, device, theme);
  // Around a place: itself and as much on both sides, and at least two steps.
  const around = (begin, end) => {
    const { start } = device.steps, typical = (device.end - device.begin) / Math.max(1, start.length);
    const length = Math.max(2.6 * typical, 3 * (end - begin));
    const middle = (begin + end) / 2;
    timeline.show(middle - length / 2, middle + length / 2);
  };
  const show = (begin, end) => {
    around(begin, end);
    document.getElementById("overview").scrollIntoView({ block: "center", behavior: "smooth" });
  };
  const panels = new Panels(trace, theme, show);
  const table = new StepTable(trace, theme, show);
  const timeline = new Timeline(trace, device, lanes, theme, (chosen) => panels.details(chosen, timeline));
  const use = (index) => {
    device = trace.devices[index];
    timeline.device = device;
    timeline.selected = null;
    lanes.show(device);
    panels.show(device);
    panels.details(null);
    table.show(device);
    timeline.overview.forget();
    timeline.resize();
    const worst = device.findings.find((finding) => finding.at);
    const { start } = device.steps, middle = Math.floor(start.length / 2);
    if (worst) around(worst.at[0], worst.at[1]);
    else if (start.length > 4) timeline.show(start[middle - 2], start[Math.min(middle + 2, start.length - 1)]);
    for (const [i, button] of [...document.getElementById("devices").children].entries()) button.setAttribute("aria-pressed", String(i === index));
  };
  const places = document.getElementById("devices");
  places.hidden = trace.devices.length < 2;
  places.replaceChildren(...trace.devices.map((one, i) => {
    const button = make("button", "ghost", trace.devices.length > 1 ? `${one.name} · ${i}` : one.name);
    button.addEventListener("click", () => use(i));
    return button;
  }));
  text("title", trace.meta.title);
  text("subtitle", `${trace.meta.source} · ${device.name}${trace.meta.rank === null ? "" : ` · rank ${trace.meta.rank}`} · ${duration(trace.length)}`);
  text("warnings", trace.meta.warnings.join(" · "));
  document.getElementById("save").addEventListener("click", () => {
    timeline.canvas.toBlob((blob) => {
      const link = make("a");
      link.href = URL.createObjectURL(blob);
      link.download = `${trace.meta.title}.png`;
      link.click();
      URL.revokeObjectURL(link.href);
    });
  });
  use(0);
  globalThis.stretto = { trace, timeline, table, lanes };
  document.body.dataset.ready = "yes";
}

main().catch((error) => {
  const box = document.getElementById("problem");
  box.hidden = false;
  box.textContent = `The picture cannot be drawn: ${error.message}. It needs a browser of 2023 or later.`;
  throw error;
});
