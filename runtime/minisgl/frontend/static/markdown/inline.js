// Text of a block to inline nodes: strings and objects with a `type`. Plain data, no DOM.

const MAX_DEPTH = 30;
const MAX_ADDRESS = 2000;
const PUNCTUATION = /[!-/:-@[-`{-~\p{P}\p{S}]/u;
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const ADDRESS = /https?:\/\/[^\s<>"`]+/y;
// Part of the sentence, where an address ends with it.
const BEHIND_ADDRESS = ".,;:!?*_~']";
const BRACKETED = /<(https?:\/\/[^\s<>]+|mailto:[^\s<>]+)>/y;
const LINE_BREAK = /<br[ \t]*\/?>/iy;
const ENTITY = /&(amp|lt|gt|quot|nbsp|#39);/y;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', nbsp: "\u00a0", "#39": "'" };
const STYLES = { "*": ["em", "strong"], _: ["em", "strong"], "~": ["del", "del"] };

export function parseInline(text) {
  return new InlineParser(text).parse();
}

class InlineParser {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.items = [];
    this.plain = "";
    this.brackets = [];
    // Markers of which no further one follows: they are not searched for again.
    this.missing = new Set();
  }

  parse() {
    while (this.at < this.text.length) {
      const character = this.text[this.at];
      const read = READERS[character];
      if (!read || !read.call(this, character)) {
        this.plain += character;
        this.at++;
      }
    }
    this.flush();
    return pairDelimiters(this.items);
  }

  flush() {
    if (this.plain) this.items.push(this.plain);
    this.plain = "";
  }

  push(item, end) {
    this.flush();
    this.items.push(item);
    this.at = end;
    return true;
  }

  match(pattern) {
    pattern.lastIndex = this.at;
    return pattern.exec(this.text);
  }

  // Returns where `marker` comes next, or -1.
  find(marker, from) {
    if (this.missing.has(marker)) return -1;
    const found = this.text.indexOf(marker, from);
    if (found < 0) this.missing.add(marker);
    return found;
  }

  readEscape() {
    const next = this.text[this.at + 1];
    if (next === "(" || next === "[") {
      const close = this.find(next === "(" ? "\\)" : "\\]", this.at + 2);
      if (close > 0) {
        return this.push({ type: "math", text: this.text.slice(this.at + 2, close), display: next === "[" }, close + 2);
      }
    }
    if (next === "\n") return this.push({ type: "break" }, this.at + 2);
    if (next === undefined || !ESCAPABLE.test(next)) return false;
    this.plain += next;
    this.at += 2;
    return true;
  }

  readCode() {
    const [ticks] = this.match(/`+/y);
    const begin = this.at + ticks.length;
    if (!this.missing.has(ticks)) {
      for (const { 0: run, index } of this.text.slice(begin).matchAll(/`+/g)) {
        if (run.length !== ticks.length) continue;
        const code = this.text.slice(begin, begin + index).replaceAll("\n", " ");
        const padded = code.startsWith(" ") && code.endsWith(" ") && code.trim();
        return this.push({ type: "code", text: padded ? code.slice(1, -1) : code }, begin + index + run.length);
      }
      this.missing.add(ticks);
    }
    this.plain += ticks;
    this.at = begin;
    return true;
  }

  // Single dollars surround math only where no space is inside of them, and no digit behind: others are prices.
  readDollar() {
    const marker = this.text.startsWith("$$", this.at) ? "$$" : "$";
    const begin = this.at + marker.length;
    const close = this.find(marker, begin);
    if (close <= begin) return false;
    const inner = this.text.slice(begin, close);
    if (inner.includes("\n\n")) return false;
    if (marker === "$" && (/^\s|\s$/.test(inner) || /[\d$]/.test(this.text[close + 1] ?? ""))) return false;
    return this.push({ type: "math", text: inner, display: marker === "$$" }, close + marker.length);
  }

  readDelimiters(character) {
    let end = this.at;
    while (this.text[end] === character) end++;
    const count = end - this.at;
    if (character === "~" && count !== 2) return false;
    const before = this.text[this.at - 1] ?? " ", behind = this.text[end] ?? " ";
    const left = !/\s/.test(behind) && (!PUNCTUATION.test(behind) || /\s/.test(before) || PUNCTUATION.test(before));
    const right = !/\s/.test(before) && (!PUNCTUATION.test(before) || /\s/.test(behind) || PUNCTUATION.test(behind));
    // Underscores within a word are part of a name.
    const opens = left && (character !== "_" || !right || PUNCTUATION.test(before));
    const closes = right && (character !== "_" || !left || PUNCTUATION.test(behind));
    return this.push({ run: character, count, whole: count, opens, closes }, end);
  }

  readBracket() {
    return this.openBracket("[");
  }

  // No address is loaded: an image is a link to it.
  readImage() {
    return this.text[this.at + 1] === "[" && this.openBracket("![");
  }

  openBracket(marker) {
    this.flush();
    this.brackets.push(this.items.length);
    return this.push(marker, this.at + marker.length);
  }

  readLinkEnd() {
    const opened = this.brackets.pop();
    if (opened === undefined || this.text[this.at + 1] !== "(") return false;
    const [address, end] = readDestination(this.text, this.at + 2);
    if (address === null) return false;
    this.flush();
    const children = pairDelimiters(this.items.splice(opened).slice(1));
    // A link contains no other one.
    this.brackets.length = 0;
    return this.push({ type: "link", address, children }, end);
  }

  readAngle() {
    const [whole, address] = this.match(BRACKETED) ?? [];
    if (whole) return this.push({ type: "link", address, children: [address] }, this.at + whole.length);
    const [line] = this.match(LINE_BREAK) ?? [];
    return line ? this.push({ type: "break" }, this.at + line.length) : false;
  }

  readAddress() {
    if (/\w/.test(this.text[this.at - 1] ?? "")) return false;
    const [found] = this.match(ADDRESS) ?? [];
    if (!found) return false;
    let end = found.length;
    while (BEHIND_ADDRESS.includes(found[end - 1])) end--;
    const count = bracket => found.split(bracket).length;
    for (let unopened = count(")") - count("("); unopened > 0 && found[end - 1] === ")"; unopened--) end--;
    const address = found.slice(0, end);
    return this.push({ type: "link", address, children: [address] }, this.at + address.length);
  }

  readEntity() {
    const [whole, name] = this.match(ENTITY) ?? [];
    if (!whole) return false;
    this.plain += ENTITIES[name];
    this.at += whole.length;
    return true;
  }

  readLine() {
    this.plain = this.plain.trimEnd();
    return this.push({ type: "break" }, this.at + 1);
  }
}

const READERS = {
  "\\": InlineParser.prototype.readEscape,
  "`": InlineParser.prototype.readCode,
  $: InlineParser.prototype.readDollar,
  "*": InlineParser.prototype.readDelimiters,
  _: InlineParser.prototype.readDelimiters,
  "~": InlineParser.prototype.readDelimiters,
  "[": InlineParser.prototype.readBracket,
  "!": InlineParser.prototype.readImage,
  "]": InlineParser.prototype.readLinkEnd,
  "<": InlineParser.prototype.readAngle,
  h: InlineParser.prototype.readAddress,
  "&": InlineParser.prototype.readEntity,
  "\n": InlineParser.prototype.readLine,
};

// Returns the address between parentheses, with an optional title, and what follows; null if there is none.
function readDestination(text, at) {
  const limit = Math.min(text.length, at + MAX_ADDRESS);
  let depth = 1, end = at;
  for (; end < limit; end++) {
    if (text[end] === "\n") return [null, 0];
    if (text[end] === "(") depth++;
    if (text[end] === ")" && --depth === 0) break;
  }
  if (depth !== 0) return [null, 0];
  const [address = ""] = text.slice(at, end).trim().split(/\s/);
  return address ? [address.replace(/^<(.*)>$/, "$1"), end + 1] : [null, 0];
}

// Makes emphasis of runs of delimiters, by the rules of CommonMark.
function pairDelimiters(items) {
  const out = [];
  // Runs that may be opened, by their place in `out`; and the places below which a kind of run has no partner.
  const openers = [], floors = new Map();
  for (const item of items) {
    if (!item.run) {
      out.push(item);
      continue;
    }
    const run = { ...item };
    while (run.closes && run.count > 0) {
      const kind = `${run.run}${run.opens}${run.whole % 3}`, floor = floors.get(kind) ?? 0;
      let number = openers.length - 1;
      while (number >= floor && !arePartners(out[openers[number]], run)) number--;
      if (number < floor) {
        floors.set(kind, openers.length);
        break;
      }
      const place = openers[number], opener = out[place];
      const used = opener.count >= 2 && run.count >= 2 ? 2 : 1;
      const children = out.splice(place + 1).map(asNode);
      const depth = 1 + children.reduce((most, child) => Math.max(most, child.depth ?? 0), 0);
      openers.length = number + 1;
      opener.count -= used;
      run.count -= used;
      if (opener.count === 0) {
        out.pop();
        openers.pop();
      }
      for (const [key, value] of floors) floors.set(key, Math.min(value, openers.length));
      if (depth > MAX_DEPTH) out.push(...children);
      else out.push({ type: STYLES[run.run][used - 1], children, depth });
    }
    if (run.count === 0) continue;
    if (run.opens) {
      openers.push(out.length);
      out.push(run);
    } else {
      out.push(asNode(run));
    }
  }
  return out.map(asNode);
}

function arePartners(opener, closer) {
  if (opener.run !== closer.run) return false;
  const both = opener.closes || closer.opens;
  return !both || (opener.whole + closer.whole) % 3 !== 0 || (opener.whole % 3 === 0 && closer.whole % 3 === 0);
}

const asNode = item => (item.run ? item.run.repeat(item.count) : item);
