// The conversation: what was said, and the answer that is on its way.

const welcome = $("welcome"); // not on the page while there are messages

const chat = {
  turns: [],
  running: null,

  start() {
    const prompt = $("prompt");
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.stop();
      else this.send(prompt.value);
    });
    prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (!this.running) this.send(prompt.value);
      }
    });
    prompt.addEventListener("input", () => this.fit());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.running) this.stop();
      if (event.key === "/" && !/^(INPUT|TEXTAREA)$/.test(document.activeElement?.tagName)) {
        event.preventDefault();
        prompt.focus();
      }
    });
    $("new-chat").addEventListener("click", () => this.clear());
    if (matchMedia("(hover: hover)").matches) prompt.focus();
  },

  /** As high as its text, up to the limit of the style sheet. */
  fit() {
    const prompt = $("prompt");
    prompt.style.height = "auto";
    prompt.style.height = `${prompt.scrollHeight}px`;
  },

  stop() { this.running?.abort(); },

  clear() {
    this.stop();
    this.turns = [];
    $("messages").replaceChildren(welcome);
    $("prompt").focus();
  },

  /** Adds a message to the page; the element of its text. */
  add(role, ...children) {
    $("welcome")?.remove();
    const text = make("div", { className: "text" }, ...children);
    const message = make("article", { className: `message ${role}`, ariaLabel: role === "user" ? "You" : "Model" }, text);
    $("messages").append(message);
    $("messages").scrollTop = $("messages").scrollHeight;
    return text;
  },

  async send(text) {
    if (!text.trim() || settings.firstBad()) return;
    const turns = this.turns;
    turns.push({ role: "user", content: text });
    this.add("user", text);
    $("prompt").value = "";
    this.fit();
    const answer = new Answer(this.add("assistant"));
    const controller = this.running = new AbortController();
    this.busy(true);
    const messages = settings.system ? [{ role: "system", content: settings.system }, ...turns] : turns;
    const body = JSON.stringify({
      messages, stream: true, stream_options: { include_usage: true }, ...settings.sampling(),
    });
    try {
      for await (const data of events("/v1/chat/completions", { key: settings.key, body, signal: controller.signal })) {
        if (data === "[DONE]") break;
        answer.take(JSON.parse(data));
      }
    } catch (error) {
      if (error.name === "AbortError") answer.ended = "stopped";
      else answer.fail(error);
      if (error.status === 401) settings.askForKey();
    }
    answer.finish();
    if (answer.text) turns.push({ role: "assistant", content: answer.text });
    else turns.pop(); // nothing was answered: the question does not stand in the next request
    if (this.running === controller) {
      this.running = null;
      this.busy(false);
    }
  },

  busy(is) {
    const button = $("send");
    button.textContent = is ? "Stop" : "Send";
    button.classList.toggle("stop", is);
    $("messages").setAttribute("aria-busy", String(is));
  },
};

/** One answer while it streams; drawn at most once a frame, however fast tokens come. */
class Answer {
  constructor(element) {
    this.element = element;
    this.text = "";
    this.ended = null;
    this.usage = null;
    this.sent = performance.now();
    this.first = this.last = 0;
    this.drawing = 0;
    this.element.parentElement.classList.add("busy");
  }

  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices[0];
    if (!choice) return;
    if (choice.delta.content) {
      this.last = performance.now();
      this.first ||= this.last;
      this.text += choice.delta.content;
      this.drawing ||= requestAnimationFrame(() => this.draw());
    }
    if (choice.finish_reason) this.ended = choice.finish_reason;
  }

  draw() {
    this.drawing = 0;
    const log = $("messages"), atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    this.element.replaceChildren(...markdown(this.text));
    if (atEnd) log.scrollTop = log.scrollHeight;
  }

  fail(error) {
    const words = error instanceof TypeError ? "The server cannot be reached." : error.message;
    this.element.after(make("p", { className: "trouble", role: "alert" }, words));
  }

  /** The last drawing, and the figures below it. */
  finish() {
    cancelAnimationFrame(this.drawing);
    this.draw();
    const message = this.element.parentElement;
    message.classList.remove("busy");
    const parts = [];
    if (this.usage) parts.push(`${this.usage.completion_tokens} tokens`);
    if (this.first) parts.push(`first after ${duration((this.first - this.sent) / 1000)}`);
    if (this.usage?.completion_tokens > 1 && this.last > this.first)
      parts.push(`${((this.usage.completion_tokens - 1) / (this.last - this.first) * 1000).toFixed(1)} tokens/s`);
    const why = { length: "cut at the token limit", stopped: "stopped" }[this.ended];
    if (why) parts.push(why);
    if (parts.length) message.append(make("p", { className: "note" }, parts.join(" · ")));
  }
}
