// The stream of what the engine does: open while the page is seen, opened again when it breaks.

const live = {
  connection: null,
  updates: 0,

  start() {
    document.addEventListener("visibilitychange", () => this.reconnect());
    this.reconnect();
  },

  /** Opens the stream anew if the page is seen; else ends it. */
  reconnect() {
    this.connection?.abort();
    this.connection = null;
    if (!document.hidden) this.follow(this.connection = new AbortController());
  },

  async follow(connection) {
    let pause = 500;
    while (!connection.signal.aborted) {
      try {
        for await (const data of events("/engine/live", { key: settings.key, signal: connection.signal })) {
          this.take(JSON.parse(data));
          pause = 500;
        }
        this.state("off", 0, "server ended");
      } catch (error) {
        if (connection.signal.aborted) return;
        if (error.status === 401) {
          this.state("off", 0, "API key needed");
          return; // opened again when the key changes
        }
        this.state("off", 0, error.status === 503 ? "not ready" : "no connection");
      }
      await new Promise((resolve) => setTimeout(resolve, pause));
      pause = Math.min(pause * 1.6, 5000);
    }
  },

  take(message) {
    if (message.kind === "engine") {
      lanes.columns = message.columns;
      $("model").textContent = message.model;
      $("about").textContent = `${message.dtype} on ${message.device} · context ${message.max_model_len} · up to `
        + `${message.max_num_seqs} requests · ${message.num_pages} pages of ${message.page_size} · overlap depth `
        + message.overlap_depth;
      return;
    }
    this.updates++;
    lanes.take(message.steps);
    figures.take(message.now, message.stats);
  },

  state(is, rate, words) {
    const state = $("state"), text = words ?? (is === "busy" ? "running" : "idle");
    if (state.dataset.is === is && state.lastElementChild.textContent === text) return;
    state.dataset.is = is;
    state.lastElementChild.textContent = text;
  },
};
