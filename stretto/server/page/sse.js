// Server-sent events over fetch, which unlike EventSource can carry an API key and a body.

/** What a refused request says: status, and the server's own words. */
class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Yields the data of each event. Ends with the stream; throws Refused, AbortError or TypeError (no connection). */
async function* events(path, { key, body, signal }) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  if (body) headers["content-type"] = "application/json";
  const response = await fetch(path, { method: body ? "POST" : "GET", headers, body, signal, cache: "no-store" });
  if (!response.ok) {
    const text = await response.text();
    let message = text.slice(0, 300);
    try {
      message = JSON.parse(text).error.message;
    } catch { /* not in OpenAI's form: its text has to do */ }
    throw new Refused(response.status, message || response.statusText);
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", data = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const raw of lines) {
      const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
      if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
      else if (!line && data.length) {
        yield data.join("\n");
        data = [];
      }
    }
  }
}
