// Blocks and inline nodes to DOM nodes.

import { copyButton, make } from "../dom.js";
import { highlightLine } from "./highlight.js";
import { parseInline } from "./inline.js";
import { renderMath } from "./math.js";

const SAFE = ["http:", "https:", "mailto:"];

export function renderBlock(block) {
  return RENDERERS[block.type](block);
}

const RENDERERS = {
  paragraph: ({ text }) => make("p", {}, ...inline(text)),
  // The page's own headings are above those of an answer.
  heading: ({ level, text }) => make(`h${Math.min(level + 2, 6)}`, { class: `level-${level}` }, ...inline(text)),
  rule: () => make("hr"),
  quote: ({ blocks }) => make("blockquote", {}, ...blocks.map(renderBlock)),
  code: block => new CodeBlock(block).node,
  math: ({ text }) => renderMath(text, true) ?? make("pre", { class: "tex" }, text.trim()),
  list: renderList,
  table: renderTable,
};

function renderList({ ordered, start, loose, items }) {
  return make(ordered ? "ol" : "ul", { start: ordered && start !== 1 ? start : null }, ...items.map(item => {
    const parts = item.blocks.flatMap(
      block => (block.type === "paragraph" && !loose ? inline(block.text) : [renderBlock(block)]));
    if (item.checked === null) return make("li", {}, ...parts);
    const box = make("input", { type: "checkbox", disabled: true, checked: item.checked, "aria-label": "done" });
    return make("li", { class: "task" }, box, ...parts);
  }));
}

function renderTable({ aligns, head, rows }) {
  const row = (tag, cells) => make("tr", {}, ...cells.map(
    (cell, number) => make(tag, { class: aligns[number] }, ...inline(cell))));
  const body = make("tbody", {}, ...rows.map(cells => row("td", cells)));
  const table = make("table", {}, make("thead", {}, row("th", head)), body);
  return make("div", { class: "scrolls", tabindex: "0", role: "group", "aria-label": "Table" }, table);
}

function inline(text) {
  return parseInline(text).map(renderInline);
}

function renderInline(item) {
  if (typeof item === "string") return item;
  switch (item.type) {
    case "break": return make("br");
    case "code": return make("code", {}, item.text);
    case "math": return renderMath(item.text, item.display) ?? make("code", { class: "tex" }, item.text.trim());
    case "link": return renderLink(item);
    default: return make(item.type, {}, ...item.children.map(renderInline));
  }
}

// Only absolute addresses of pages and mail become links: others could run code, or use this server.
function renderLink({ address, children }) {
  const inner = children.map(renderInline);
  const url = URL.canParse(address) ? new URL(address) : null;
  if (!url || !SAFE.includes(url.protocol)) return make("span", { title: address }, ...inner);
  return make("a", { href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer" }, ...inner);
}

// Code with its language and a button that copies it. A growing text renders only its new lines.
export class CodeBlock {
  constructor({ language, text }) {
    this.language = language;
    this.lines = [];
    // The state of the highlighter behind each line.
    this.states = [];
    this.code = make("code");
    this.node = make("div", { class: "code" },
      make("div", { class: "bar" }, make("span", {}, language || "text"), copyButton("Copy", () => this.text)),
      make("pre", { tabindex: "0" }, this.code));
    this.update(text);
  }

  update(text) {
    this.text = text;
    const lines = text.split("\n");
    let same = 0;
    while (same < this.lines.length && this.lines[same] === lines[same]) same++;
    while (this.code.childNodes.length > same) this.code.lastChild.remove();
    this.states.length = same;
    for (const line of lines.slice(same)) {
      const [pieces, state] = highlightLine(line, this.language, this.states.at(-1) ?? null);
      const parts = pieces.map(([kind, piece]) => (kind ? make("span", { class: kind }, piece) : piece));
      this.code.append(make("span", { class: "line" }, ...parts, "\n"));
      this.states.push(state);
    }
    this.lines = lines;
  }
}
