// The settings: remembered in this browser, the key only in this tab.

const SAMPLING = { temperature: "temperature", "top-p": "top_p", "top-k": "top_k", "max-tokens": "max_tokens", seed: "seed" };
const REMEMBERED = ["system", ...Object.keys(SAMPLING)];

const settings = {
  /** Fills the fields, and keeps what the user changes. `changed` is called when the key is another. */
  start(changed) {
    const stored = (store, name) => { try { return store.getItem(name); } catch { return null; } };
    const keep = (store, name, value) => { try { store.setItem(name, value); } catch { /* private mode: not kept */ } };
    for (const id of REMEMBERED) {
      $(id).value = stored(localStorage, `stretto.${id}`) ?? "";
      $(id).addEventListener("input", () => keep(localStorage, `stretto.${id}`, $(id).value));
    }
    $("api-key").value = stored(sessionStorage, "stretto.key") ?? "";
    $("api-key").addEventListener("change", () => {
      keep(sessionStorage, "stretto.key", $("api-key").value);
      changed();
    });
    $("open-settings").addEventListener("click", () => this.show($("settings").hidden));
    $("settings").addEventListener("submit", (event) => {
      event.preventDefault();
      $("api-key").blur();
      $("prompt").focus();
    });
    $("settings").addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation(); // it closes the settings; an answer goes on
      this.show(false);
      $("open-settings").focus();
    });
  },

  show(open) {
    $("settings").hidden = !open;
    $("open-settings").setAttribute("aria-expanded", String(open));
    if (open) $("system").focus();
  },

  get key() { return $("api-key").value.trim(); },

  get system() { return $("system").value.trim(); },

  /** The fields of a request; an empty one is left out. */
  sampling() {
    const fields = {};
    for (const [id, name] of Object.entries(SAMPLING)) if ($(id).value !== "") fields[name] = Number($(id).value);
    return fields;
  },

  /** The first field whose value cannot be, shown to the user; null if all are good. */
  firstBad() {
    const bad = Object.keys(SAMPLING).map($).find((field) => !field.checkValidity());
    if (!bad) return null;
    this.show(true);
    bad.reportValidity();
    return bad;
  },

  /** The server wants a key. */
  askForKey() {
    this.show(true);
    $("api-key").focus();
  },
};
