// The common part of Markdown as DOM nodes. Made of text nodes and a fixed set of elements, so that no answer, however
// it was provoked, can put anything else on the page.

const INLINE = /`([^`\n]+)`|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)/g;

/** A line's nodes: code, bold, italic, links to the web. */
function inline(text) {
  const nodes = [];
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index > at) nodes.push(text.slice(at, match.index));
    const [whole, code, bold, italic, label, link] = match;
    if (code) nodes.push(make("code", {}, code));
    else if (bold) nodes.push(make("strong", {}, bold));
    else if (italic) nodes.push(make("em", {}, italic));
    else nodes.push(make("a", { href: link, target: "_blank", rel: "noopener noreferrer" }, label));
    at = match.index + whole.length;
  }
  if (at < text.length) nodes.push(text.slice(at));
  return nodes;
}

/** Lines of a paragraph, with the breaks that the model wrote. */
function lines(texts) {
  return texts.flatMap((text, i) => (i ? [make("br"), ...inline(text)] : inline(text)));
}

/** The nodes of a whole answer; an open code block is one up to the end, as it is while it streams. */
function markdown(text) {
  const blocks = [];
  let open = null; // the block that the next line may belong to: { kind, texts }
  const close = () => {
    if (open) blocks.push(finished(open));
    open = null;
  };
  for (const line of text.split("\n")) {
    if (open?.kind === "code") {
      if (/^\s*```\s*$/.test(line)) close();
      else open.texts.push(line);
      continue;
    }
    const found = /^\s*```/.test(line) ? ["code", null]
      : /^#{1,6}\s+/.test(line) ? ["heading", line.replace(/^#+\s+/, "")]
      : /^\s*[-*+]\s+/.test(line) ? ["list", line.replace(/^\s*[-*+]\s+/, "")]
      : /^\s*\d{1,9}[.)]\s+/.test(line) ? ["numbers", line.replace(/^\s*\d+[.)]\s+/, "")]
      : /^>\s?/.test(line) ? ["quote", line.replace(/^>\s?/, "")]
      : line.trim() ? ["paragraph", line]
      : ["nothing", null];
    const [kind, content] = found;
    if (open?.kind !== kind || kind === "heading" || kind === "code") {
      close();
      if (kind === "nothing") continue;
      open = { kind, texts: [], first: Number(/^\s*(\d+)/.exec(line)?.[1] ?? 1) };
    }
    if (content !== null) open.texts.push(content);
  }
  close();
  return blocks;
}

function finished({ kind, texts, first }) {
  const items = () => texts.map((text) => make("li", {}, ...inline(text)));
  if (kind === "code") return make("pre", { tabIndex: 0 }, make("code", {}, texts.join("\n")));
  if (kind === "heading") return make("h3", {}, ...inline(texts[0]));
  if (kind === "list") return make("ul", {}, ...items());
  if (kind === "numbers") return make("ol", { start: first }, ...items());
  if (kind === "quote") return make("blockquote", {}, ...lines(texts));
  return make("p", {}, ...lines(texts));
}
