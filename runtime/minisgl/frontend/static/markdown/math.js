// The part of TeX's math that models write, as MathML, which browsers lay out themselves.

import { FUNCTIONS, GREEK, OPERATORS, STYLED } from "./math_symbols.js";

const MATHML = "http://www.w3.org/1998/Math/MathML";
const MAX_DEPTH = 40;
const SPACES = {
  __proto__: null, ",": "0.17em", ":": "0.22em", ";": "0.28em", " ": "0.33em", quad: "1em", qquad: "2em", "!": "0em",
};
const ACCENTS = {
  __proto__: null, hat: "^", widehat: "^", bar: "¯", overline: "¯", vec: "→", overrightarrow: "→", tilde: "~",
  widetilde: "~", dot: "˙", ddot: "¨",
};
const BRACKETS = {
  __proto__: null, "{": "{", "}": "}", "|": "‖", langle: "⟨", rangle: "⟩", lfloor: "⌊", rfloor: "⌋", lceil: "⌈",
  rceil: "⌉", lvert: "|", rvert: "|", lVert: "‖", rVert: "‖", vert: "|", Vert: "‖", lbrace: "{", rbrace: "}",
};
const FENCED = {
  __proto__: null, matrix: ["", ""], smallmatrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"],
  Bmatrix: ["{", "}"], vmatrix: ["|", "|"], Vmatrix: ["‖", "‖"], cases: ["{", ""], array: ["", ""],
};
const ALIGNED = ["align", "align*", "aligned", "split", "gather", "gather*", "gathered", "equation", "equation*"];
const WITH_LIMITS = ["lim", "max", "min", "sup", "inf", "argmax", "argmin", "det", "gcd", "Pr"];
const SIZES = /^(?:big|Big|bigg|Bigg)[lrm]?$/;
const TEXTS = ["text", "textrm", "textit", "textbf", "mbox", "operatorname", "operatorname*"];

const TOKEN = /\s*(?:%[^\n]*\n\s*)*(\\operatorname\*|\\[A-Za-z]+|\\[\s\S]|[\s\S])?/yu;

// What a function's name stands close to.
const NO_SPACE_BEFORE = [null, "(", "[", "{", "}", ",", "\\left", "\\right", "&", "\\\\", "\\end", "\\,"];

class NotUnderstood extends Error {}

// Returns a <math> element; null if the text has something else than this subset. Does not throw.
export function renderMath(tex, display) {
  try {
    const parser = new MathParser(tex, display);
    const body = parser.row([]);
    if (parser.token !== null) return null;
    return math("math", { display: display ? "block" : "inline" }, body);
  } catch (error) {
    // A fault of the parser costs one formula, not the page.
    if (!(error instanceof NotUnderstood)) console.error(error);
    return null;
  }
}

function math(tag, attributes = {}, ...children) {
  const node = document.createElementNS(MATHML, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// A token is a command with its backslash, or one character; spaces count only in texts.
class MathParser {
  constructor(tex, display) {
    this.tex = tex;
    this.display = display;
    this.at = 0;
    this.depth = 0;
    this.next();
  }

  next() {
    TOKEN.lastIndex = this.at;
    const [whole, token] = TOKEN.exec(this.tex);
    this.begin = this.at + whole.length - (token?.length ?? 0);
    this.at += whole.length;
    this.token = token ?? null;
  }

  take(token) {
    if (this.token !== token) throw new NotUnderstood();
    this.next();
  }

  // Begins a row or an argument, through which all nesting goes; who calls it lowers `depth` at the end.
  enter() {
    if (++this.depth > MAX_DEPTH) throw new NotUnderstood();
  }

  // Reads until one of the tokens, which stays.
  row(ends) {
    this.enter();
    const parts = [];
    while (this.token !== null && !ends.includes(this.token)) {
      const isFunction = FUNCTIONS.includes(this.token.slice(1));
      if (isFunction && parts.length && parts.at(-1).localName !== "mo") parts.push(thinSpace());
      parts.push(this.scripted());
      if (isFunction && !NO_SPACE_BEFORE.includes(this.token)) parts.push(thinSpace());
    }
    this.depth--;
    return parts.length === 1 ? parts[0] : math("mrow", {}, ...parts);
  }

  // An atom with what stands above and below it.
  scripted() {
    const limits = this.display && this.takesLimits();
    const base = this.atom();
    let below = null, above = null, primes = 0, stacked = limits;
    for (;; ) {
      if (this.token === "_" && !below) {
        this.next();
        below = this.argument();
      } else if (this.token === "^" && !above) {
        this.next();
        above = this.argument();
      } else if (this.token === "'") {
        this.next();
        primes++;
      } else if (this.token === "\\limits" || this.token === "\\nolimits") {
        stacked = this.token === "\\limits";
        this.next();
      } else {
        break;
      }
    }
    if (primes) {
      const marks = math("mo", {}, "′".repeat(primes));
      above = above ? math("mrow", {}, marks, above) : marks;
    }
    stacked ||= base.classList.contains("brace");
    if (below && above) return math(stacked ? "munderover" : "msubsup", {}, base, below, above);
    if (below) return math(stacked ? "munder" : "msub", {}, base, below);
    return above ? math(stacked ? "mover" : "msup", {}, base, above) : base;
  }

  takesLimits() {
    const name = this.token?.slice(1) ?? "";
    return "∑∏∐⋃⋂⨁⨂⋁⋀".includes(OPERATORS[name] ?? " ") || WITH_LIMITS.includes(name);
  }

  // What a command or a script applies to: a group or one atom.
  argument() {
    if (this.token === "{") return this.group();
    if (this.token === null) throw new NotUnderstood();
    if (/\d/.test(this.token)) {
      const digit = math("mn", {}, this.token);
      this.next();
      return digit;
    }
    this.enter();
    const atom = this.atom();
    this.depth--;
    return atom;
  }

  group() {
    this.take("{");
    const body = this.row(["}"]);
    this.take("}");
    return body;
  }

  atom() {
    const token = this.token;
    if (token === "{") return this.group();
    if (token.startsWith("\\")) return this.command(token.slice(1));
    if ("}&^_#$".includes(token)) throw new NotUnderstood();
    if (/\d/.test(token)) return this.number();
    this.next();
    if (/\p{L}/u.test(token)) return math("mi", {}, token);
    if (token === "~") return math("mspace", { width: "0.33em" });
    return operator(token === "-" ? "−" : token === "*" ? "∗" : token);
  }

  number() {
    const [digits] = /^\d+(?:,\d{3}(?!\d))*(?:\.\d+)?/.exec(this.tex.slice(this.begin));
    this.at = this.begin + digits.length;
    this.next();
    return math("mn", {}, digits);
  }

  command(name) {
    if (TEXTS.includes(name)) return this.text(name);
    this.next();
    if (name in SPACES) return math("mspace", { width: SPACES[name] });
    if (name in GREEK) return math("mi", {}, GREEK[name]);
    if (name in OPERATORS) return operator(OPERATORS[name]);
    if (FUNCTIONS.includes(name)) return math("mi", {}, name.replace(/^arg(?=m)/, "arg "));
    if (name in STYLED) return this.styled(STYLED[name]);
    if (name in ACCENTS) {
      const mark = math("mo", { stretchy: String(/over|wide/.test(name)) }, ACCENTS[name]);
      return math("mover", { accent: "true" }, this.argument(), mark);
    }
    if (name in BRACKETS) return operator(BRACKETS[name]);
    if (SIZES.test(name)) return math("mo", { stretchy: "false" }, this.bracket());
    if (Object.hasOwn(COMMANDS, name)) return COMMANDS[name].call(this, name);
    throw new NotUnderstood();
  }

  bracket() {
    const token = this.token;
    if (token === null) throw new NotUnderstood();
    this.next();
    if (token[0] === "\\" && token.slice(1) in BRACKETS) return BRACKETS[token.slice(1)];
    if (token === ".") return "";
    if ("()[]|/<>".includes(token)) return token;
    throw new NotUnderstood();
  }

  fraction(attributes = {}) {
    return math("mfrac", attributes, this.argument(), this.argument());
  }

  root() {
    if (this.token !== "[") return math("msqrt", {}, this.argument());
    this.next();
    const degree = this.row(["]"]);
    this.take("]");
    return math("mroot", {}, this.argument(), degree);
  }

  fenced() {
    const open = this.bracket(), parts = [fence(open)];
    while (this.token !== "\\right") {
      if (this.token === null) throw new NotUnderstood();
      if (this.token === "\\middle") {
        this.next();
        parts.push(fence(this.bracket()));
      } else {
        parts.push(this.row(["\\right", "\\middle"]));
      }
    }
    this.next();
    return math("mrow", {}, ...parts, fence(this.bracket()));
  }

  environment() {
    const name = this.rawGroup();
    this.next();
    if (name === "array" && this.token === "{") {
      this.rawGroup();
      this.next();
    }
    if (!(name in FENCED) && !ALIGNED.includes(name)) throw new NotUnderstood();
    const rows = [[]];
    while (this.token !== "\\end") {
      if (this.token === null) throw new NotUnderstood();
      if (this.token === "\\hline") this.next();
      rows.at(-1).push(this.row(["&", "\\\\", "\\end"]));
      if (this.token === "&") this.next();
      else if (this.token === "\\\\") {
        this.next();
        rows.push([]);
      }
    }
    this.next();
    if (this.token !== "{" || this.rawGroup() !== name) throw new NotUnderstood();
    this.next();
    const kind = ALIGNED.includes(name) ? "aligned" : name === "cases" ? "cases" : "matrix";
    const table = math("mtable", { class: kind }, ...rows.filter(row => row.length).map(
      row => math("mtr", {}, ...row.map(cell => math("mtd", {}, cell)))));
    const [open, close] = FENCED[name] ?? ["", ""];
    return open || close ? math("mrow", {}, fence(open), table, fence(close)) : table;
  }

  // Returns the text of a group, and stays before what follows.
  rawGroup() {
    if (this.token !== "{") throw new NotUnderstood();
    let depth = 0;
    for (let end = this.begin; end < this.tex.length; end++) {
      if (this.tex[end] === "{") depth++;
      if (this.tex[end] === "}" && --depth === 0) {
        const text = this.tex.slice(this.begin + 1, end);
        this.at = end + 1;
        return text;
      }
    }
    throw new NotUnderstood();
  }

  text(name) {
    this.next();
    const text = this.rawGroup();
    this.next();
    if (/[\\$]/.test(text.replaceAll(/\\[ %&_#{}]/g, ""))) throw new NotUnderstood();
    const plain = text.replaceAll(/\\([ %&_#{}])/g, "$1");
    if (name.startsWith("operatorname")) return math("mi", { mathvariant: "normal" }, plain);
    // MathML drops spaces at both ends of a text.
    return math("mtext", {}, plain.replaceAll(" ", "\u00a0"));
  }

  styled(letters) {
    const node = this.argument();
    for (const part of [node, ...node.querySelectorAll("mi, mn")]) {
      if (part.localName !== "mi" && part.localName !== "mn") continue;
      part.textContent = [...part.textContent].map(letters).join("");
      part.setAttribute("mathvariant", "normal");
    }
    return node;
  }
}

const COMMANDS = {
  frac() { return this.fraction(); },
  dfrac() { return math("mstyle", { displaystyle: "true" }, this.fraction()); },
  tfrac() { return math("mstyle", { displaystyle: "false" }, this.fraction()); },
  cfrac() { return math("mstyle", { displaystyle: "true" }, this.fraction()); },
  binom() { return math("mrow", {}, fence("("), this.fraction({ linethickness: "0" }), fence(")")); },
  sqrt() { return this.root(); },
  left() { return this.fenced(); },
  begin() { return this.environment(); },
  boxed() { return math("mrow", { class: "boxed" }, this.argument()); },
  underline() { return math("munder", {}, this.argument(), math("mo", {}, "_")); },
  overset() { const above = this.argument(); return math("mover", {}, this.argument(), above); },
  underset() { const below = this.argument(); return math("munder", {}, this.argument(), below); },
  stackrel() { return COMMANDS.overset.call(this); },
  underbrace() { return math("munder", { class: "brace" }, this.argument(), math("mo", { stretchy: "true" }, "⏟")); },
  overbrace() { return math("mover", { class: "brace" }, this.argument(), math("mo", { stretchy: "true" }, "⏞")); },
  pmod() {
    const [before, inside] = ["0.5em", "0.33em"].map(width => math("mspace", { width }));
    return math("mrow", {}, before, operator("("), math("mi", {}, "mod"), inside, this.argument(), operator(")"));
  },
  bmod() { return math("mo", { lspace: "0.28em", rspace: "0.28em" }, "mod"); },
  not() { const { textContent } = this.argument(); return operator(`${textContent}\u0338`); },
  displaystyle() {
    return math("mstyle", { displaystyle: "true" }, this.row(["}", "&", "\\\\", "\\end", "\\right", "]"]));
  },
};

const thinSpace = () => math("mspace", { width: "0.17em" });
const fence = text => math("mo", { fence: "true", stretchy: "true" }, text);

// Brackets grow only where the text says so.
function operator(text) {
  return math("mo", "()[]{}|‖⟨⟩⌊⌋⌈⌉/".includes(text) ? { stretchy: "false" } : {}, text);
}
