// Markdown text to a tree of blocks: CommonMark with tables, task lists and display math, without HTML, reference links
// and indented code. Plain data, no DOM.

const MAX_DEPTH = 12;
const MAX_MATH_LINES = 100;
// Empty cells that are added to the short rows of a table. Without a limit, lines of one character below a wide header
// would make a table that grows with the square of its text.
const MAX_ADDED_CELLS = 5000;
const FENCE = /^ *(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]|$)/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const MARKER = /^( *)([-*+]|\d{1,9}[.)])([ \t]+|$)/;
const UNDERLINE = /^ {0,3}(={3,}|-{3,})[ \t]*$/;
const TASK = /^\[([ xX])\][ \t]+/;
const MATH = [["$$", "$$"], ["\\[", "\\]"]];

const isBlank = line => line.trim() === "";
const indentOf = line => line.length - line.trimStart().length;

// Returns blocks; each has the number of its first line in `line`.
export function parseBlocks(lines, depth = 0) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (isBlank(lines[at])) {
      at++;
      continue;
    }
    const [block, end] = readBlock(lines, at, depth);
    blocks.push({ ...block, line: at });
    at = end;
  }
  return blocks;
}

// Returns the block that begins at a line, and the number of the line behind it.
function readBlock(lines, at, depth) {
  const found = readFence(lines, at) ?? readMath(lines, at) ?? readHeading(lines, at);
  if (found) return found;
  if (RULE.test(lines[at])) return [{ type: "rule" }, at + 1];
  if (depth < MAX_DEPTH && QUOTE.test(lines[at])) return readQuote(lines, at, depth);
  if (depth < MAX_DEPTH && MARKER.test(lines[at])) return readList(lines, at, depth);
  return readTable(lines, at) ?? readParagraph(lines, at, depth);
}

function readFence(lines, at) {
  const [, fence, info] = FENCE.exec(lines[at]) ?? [];
  if (!fence) return null;
  const indent = indentOf(lines[at]), text = [];
  let end = at + 1;
  for (; end < lines.length && !closesFence(lines[end], fence); end++) {
    text.push(lines[end].slice(Math.min(indent, indentOf(lines[end]))));
  }
  const language = info.trim().split(/[\s{,]/)[0];
  return [{ type: "code", language, text: text.join("\n") }, end + 1];
}

function closesFence(line, fence) {
  const text = line.trim();
  return text.length >= fence.length && text[0] === fence[0] && text === fence[0].repeat(text.length);
}

// Display math ends with its marker at the end of a line. Without one before a blank line it is a paragraph.
function readMath(lines, at) {
  const first = lines[at].trim();
  const [open, close] = MATH.find(([marker]) => first.startsWith(marker)) ?? [];
  if (!open) return null;
  const text = [];
  const limit = Math.min(lines.length, at + MAX_MATH_LINES);
  for (let end = at; end < limit && !isBlank(lines[end]); end++) {
    const line = end === at ? first.slice(open.length) : lines[end].trim();
    if (line.endsWith(close)) {
      text.push(line.slice(0, -close.length));
      const tex = text.join("\n");
      return tex.includes(close) ? null : [{ type: "math", text: tex }, end + 1];
    }
    text.push(line);
  }
  return null;
}

function readHeading(lines, at) {
  const [, marks] = HEADING.exec(lines[at]) ?? [];
  if (!marks) return null;
  const text = lines[at].trim().slice(marks.length).trim();
  let end = text.length;
  while (text[end - 1] === "#") end--;
  const closes = end === 0 || /[ \t]/.test(text[end - 1]);
  const title = closes ? text.slice(0, end).trim() : text;
  return [{ type: "heading", level: marks.length, text: title }, at + 1];
}

function readQuote(lines, at, depth) {
  const inner = [];
  let end = at;
  for (; end < lines.length && !isBlank(lines[end]); end++) {
    if (!QUOTE.test(lines[end]) && (isBlank(inner.at(-1)) || startsBlock(lines, end))) break;
    inner.push(lines[end].replace(QUOTE, ""));
  }
  return [{ type: "quote", blocks: parseBlocks(inner, depth + 1) }, end];
}

function readList(lines, at, depth) {
  const [, { length: base }, marker] = MARKER.exec(lines[at]);
  const kind = marker.at(-1);
  const list = { type: "list", ordered: /\d/.test(marker), start: parseInt(marker, 10), loose: false, items: [] };
  let end = at;
  while (end < lines.length) {
    const [whole, indent, itemMarker, space] = MARKER.exec(lines[end]) ?? [];
    if (whole === undefined || indent.length >= base + 2 || itemMarker.at(-1) !== kind || RULE.test(lines[end])) break;
    const content = indent.length + itemMarker.length + (space.length > 4 ? 1 : Math.max(space.length, 1));
    const first = lines[end].slice(content);
    const [item, next] = readItem(lines, end + 1, base, content, first);
    const [task, check] = TASK.exec(item[0]) ?? [];
    if (task) item[0] = item[0].slice(task.length);
    list.items.push({ checked: task ? check !== " " : null, blocks: parseBlocks(item, depth + 1) });
    const behind = skipBlank(lines, next);
    if (item.some((line, number) => isBlank(line) && number > 0)) list.loose = true;
    end = next;
    if (behind > next && MARKER.test(lines[behind] ?? "")) {
      // A blank line between two items.
      const [, nextIndent, nextMarker] = MARKER.exec(lines[behind]);
      if (nextIndent.length < base + 2 && nextMarker.at(-1) === kind) {
        list.loose = true;
        end = behind;
      }
    }
  }
  return [list, end];
}

// Returns the lines of an item without their indent, and the number of the line behind it.
function readItem(lines, at, base, content, first) {
  const item = [first];
  let end = at;
  while (end < lines.length) {
    const line = lines[end];
    if (isBlank(line)) {
      const next = skipBlank(lines, end);
      if (next === lines.length || indentOf(lines[next]) < base + 2) break;
      for (; end < next; end++) item.push("");
      continue;
    }
    const indent = indentOf(line);
    if (indent < base + 2 && (startsBlock(lines, end) || MARKER.test(line))) break;
    item.push(line.slice(Math.min(indent, content)));
    end++;
  }
  return [item, end];
}

function skipBlank(lines, at) {
  while (at < lines.length && isBlank(lines[at])) at++;
  return at;
}

function readTable(lines, at) {
  if (!startsTable(lines, at)) return null;
  const head = splitRow(lines[at]);
  const aligns = splitRow(lines[at + 1]).map(cell => {
    if (!cell.endsWith(":")) return "left";
    return cell.startsWith(":") ? "center" : "right";
  });
  const rows = [];
  let end = at + 2, added = 0;
  for (; end < lines.length && !isBlank(lines[end]) && !startsBlock(lines, end); end++) {
    const cells = splitRow(lines[end]).slice(0, head.length);
    for (; cells.length < head.length && added < MAX_ADDED_CELLS; added++) cells.push("");
    rows.push(cells);
  }
  return [{ type: "table", aligns, head, rows }, end];
}

function startsTable(lines, at) {
  if (!lines[at].includes("|") || !lines[at + 1]?.includes("-")) return false;
  const cells = splitRow(lines[at + 1]);
  return cells.every(cell => /^:?-+:?$/.test(cell)) && cells.length === splitRow(lines[at]).length;
}

function splitRow(line) {
  const cells = line.trim().replace(/^\|/, "").split(/(?<!\\)\|/);
  if (cells.length > 1 && isBlank(cells.at(-1))) cells.pop();
  return cells.map(cell => cell.trim().replaceAll("\\|", "|"));
}

function readParagraph(lines, at) {
  let end = at + 1;
  for (; end < lines.length && !isBlank(lines[end]); end++) {
    const [, underline] = UNDERLINE.exec(lines[end]) ?? [];
    if (underline) {
      const text = lines.slice(at, end).join("\n").trim();
      return [{ type: "heading", level: underline[0] === "=" ? 1 : 2, text }, end + 1];
    }
    if (startsBlock(lines, end) || startsTable(lines, end)) break;
  }
  return [{ type: "paragraph", text: lines.slice(at, end).map(line => line.trimStart()).join("\n").trimEnd() }, end];
}

// Returns whether a line ends a paragraph, because it begins another block.
function startsBlock(lines, at) {
  const line = lines[at];
  if (FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)) return true;
  const [whole, , marker] = MARKER.exec(line) ?? [];
  // A number at the begin of a line is most often a part of the sentence, unless it is the first one.
  const begins = whole !== undefined && whole.length < line.length;
  const isItem = begins && (!/\d/.test(marker) || parseInt(marker, 10) === 1);
  return isItem || readMath(lines, at) !== null;
}
