// Colours: read from the style sheet once per theme, so that canvas and page agree.

const CAUSE_VARIABLE = { copy: "--cause-copy" };

class Theme {
  constructor(meta) {
    this._causes = meta.causes.map(([name]) => name);
    this._listeners = [];
    const dark = matchMedia("(prefers-color-scheme: dark)");
    this._use(dark.matches);
    dark.addEventListener("change", () => this._use(dark.matches));
    document.getElementById("theme").addEventListener("click", () => this._use(!this.dark));
  }

  onChange(listener) { this._listeners.push(listener); }

  _use(dark) {
    this.dark = dark;
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    this._read();
    for (const listener of this._listeners) listener();
  }

  _read() {
    const style = getComputedStyle(document.documentElement);
    const get = (name) => style.getPropertyValue(name).trim();
    for (const name of ["page", "card", "line", "ink", "dim", "grid", "shade", "lane", "gutter", "accent"]) this[name] = get(`--${name}`);
    this.onSpan = get("--on-span");
    this.causes = this._causes.map((name) => get(CAUSE_VARIABLE[name] || `--${name}`));
    this.compute = get("--compute");
    // By DeviceKind: kernel, copy up, copy down, copy on the device, set, work.
    this.kinds = ["--compute", "--copy", "--copy", "--set", "--set", "--work"].map(get);
    // By HostKind: annotation, Python, operator, call, system wait.
    this.host = ["--annotation", "--python", "--operator", "--call", "--wait"].map(get);
    // By Severity: lost, shortened, overlapped, planned, outside.
    this.severities = ["--sync", "--upload", "--wait", "--wait", "--wait"].map(get);
    this._shades = new Map();
  }

  // White or near black, whatever reads better on a colour given as #rrggbb.
  onVivid(colour) {
    const [r, g, b] = [1, 3, 5].map((at) => (parseInt(colour.slice(at, at + 2), 16) / 255) ** 2.2);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.26 ? "#1b1208" : "#fff";
  }

  // Kernels differ a little by name, so that the eye finds repetitions.
  kernel(name) {
    let colour = this._shades.get(name);
    if (!colour) {
      const hash = Math.imul(name + 1, 2654435761) >>> 0;
      const hue = 152 + (hash % 30), light = (this.dark ? 36 : 50) + ((hash >> 8) % 13) - 4;
      colour = `hsl(${hue} ${this.dark ? 36 : 34}% ${light}%)`;
      this._shades.set(name, colour);
    }
    return colour;
  }
}
