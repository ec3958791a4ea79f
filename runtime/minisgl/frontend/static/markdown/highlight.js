// Simple colours of code: comments, texts, numbers and keywords, line by line.

const words = text => new Set(text.trim().split(/\s+/));

const C_WORDS = `if else for while do switch case default break continue return goto const static struct enum union
  void int char float double long short unsigned signed bool auto namespace class public private protected virtual
  override template typename using new delete try catch throw throws this final abstract interface extends implements
  import package sizeof true false null nullptr var let fn func def defer go chan map range type select fallthrough
  pub mod use impl trait match mut ref move async await where loop dyn crate self Self super unsafe val when object
  companion data sealed fun string String instanceof include define ifdef ifndef endif pragma`;
const SCRIPT_WORDS = `break case catch class const continue debugger default delete do else export extends finally for
  from function if import in instanceof let new of return static super switch this throw try typeof var void while
  with yield async await true false null undefined interface type enum implements private public protected readonly as
  namespace declare abstract satisfies keyof`;
const PYTHON_WORDS = `False None True and as assert async await break class continue def del elif else except finally
  for from global if import in is lambda match case nonlocal not or pass raise return try while with yield self`;
const SHELL_WORDS = `if then else elif fi for while until do done case esac in function return local export readonly
  set unset shift exit echo cd source sudo trap`;
const SQL_WORDS = `select from where and or not in is null as join left right inner outer full on group by order
  having limit offset insert into values update set delete create table view index drop alter add primary key foreign
  references unique default check constraint with union all distinct case when then else end between like exists begin
  commit rollback asc desc count sum avg min max integer text varchar boolean timestamp`;
const LUA_WORDS = `and break do else elseif end false for function goto if in local nil not or repeat return then true
  until while let where data case of type`;
const RUBY_WORDS = "end do begin rescue ensure module require unless until then puts nil true false function";

const C = { comment: /\/\/.*/y, blocks: [["/*", "*/"]], quotes: `"'`, words: words(C_WORDS) };
// A single quote is most often a lifetime.
const RUST = { ...C, quotes: '"' };
const SCRIPT = { comment: /\/\/.*/y, blocks: [["/*", "*/"], ["`", "`"]], quotes: `"'`, words: words(SCRIPT_WORDS) };
const PYTHON = { comment: /#.*/y, blocks: [['"""', '"""'], ["'''", "'''"]], quotes: `"'`, words: words(PYTHON_WORDS) };
const SHELL = { comment: /(?<!\S)#.*/y, blocks: [], quotes: `"'`, words: words(SHELL_WORDS) };
const SQL = { comment: /--.*/y, blocks: [["/*", "*/"]], quotes: `'"`, words: words(SQL_WORDS), ignoresCase: true };
const DATA = { comment: /(?<!\S)#.*/y, blocks: [], quotes: `"'`, words: words("true false null yes no on off") };
const MARKUP = { comment: null, blocks: [["<!--", "-->"]], quotes: '"', words: words("") };
const STYLE = { comment: null, blocks: [["/*", "*/"]], quotes: `"'`, words: words("important") };
const LUA = { comment: /--.*/y, blocks: [["[[", "]]"]], quotes: `"'`, words: words(LUA_WORDS) };
const RUBY = { comment: /#.*/y, blocks: [], quotes: `"'`, words: words(`${PYTHON_WORDS} ${RUBY_WORDS}`) };

const LANGUAGES = new Map();
for (const [names, language] of [
  ["c h cpp c++ cc hpp cuda cu java kotlin kt scala go golang swift csharp cs c# dart php proto protobuf glsl", C],
  ["rust rs", RUST],
  ["javascript js jsx typescript ts tsx mjs node", SCRIPT],
  ["python py python3 ipython starlark", PYTHON],
  ["bash sh shell zsh console shell-session fish dockerfile docker makefile make", SHELL],
  ["sql postgresql mysql sqlite", SQL],
  ["json jsonc json5 yaml yml toml ini conf env properties", DATA],
  ["html xml svg vue markup", MARKUP],
  ["css scss less", STYLE],
  ["lua haskell hs", LUA],
  ["ruby rb r julia jl perl elixir", RUBY],
]) for (const name of names.split(" ")) LANGUAGES.set(name, language);

const NUMBER = /(?:0[xXbBoO][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\w*/y;
const WORD = /[\p{L}_$@][\p{L}\p{N}_$-]*/yu;
const KEY = /\s*[:=](?!=)/y;

// Returns the pieces of a line, as [class or "", text], and the state in which the next line begins. `state` is that of
// the line before, null at first: the end of a comment or text over several lines, and its class.
export function highlightLine(line, name, state) {
  const pieces = [];
  const add = (kind, text) => {
    if (pieces.length && pieces.at(-1)[0] === kind) pieces.at(-1)[1] += text;
    else if (text) pieces.push([kind, text]);
  };
  const lower = name.toLowerCase();
  if (lower === "diff" || lower === "patch") {
    add({ "+": "added", "-": "removed", "@": "comment" }[line[0]] ?? "", line);
    return [pieces, null];
  }
  const language = LANGUAGES.get(lower);
  if (!language) return [line ? [["", line]] : [], null];
  let at = 0;
  const take = (kind, end) => {
    add(kind, line.slice(at, end));
    at = end;
  };
  // Returns how many characters a pattern matches.
  const match = (pattern, from = at) => {
    pattern.lastIndex = from;
    return pattern.exec(line)?.[0].length ?? 0;
  };
  while (at < line.length) {
    if (state) {
      const end = line.indexOf(state.end, at);
      take(state.kind, end < 0 ? line.length : end + state.end.length);
      if (end < 0) return [pieces, state];
      state = null;
      continue;
    }
    const length = language.comment ? match(language.comment) : 0;
    const block = language.blocks.find(([open]) => line.startsWith(open, at));
    if (length) {
      take("comment", at + length);
    } else if (block) {
      state = { end: block[1], kind: /^[/<]/.test(block[0]) ? "comment" : "text" };
      take(state.kind, at + block[0].length);
    } else if (language.quotes.includes(line[at])) {
      const end = endOfText(line, at);
      const isKey = language === DATA && match(KEY, end) > 0;
      take(isKey ? "name" : "text", end);
    } else {
      readWord(language, line, match, take, at);
    }
  }
  return [pieces, state];
}

// Returns the place behind the text that begins with a quote, or the end of the line.
function endOfText(line, begin) {
  let end = begin + 1;
  while (end < line.length && line[end] !== line[begin]) end += line[end] === "\\" ? 2 : 1;
  return Math.min(end + 1, line.length);
}

function readWord(language, line, match, take, at) {
  const digits = match(NUMBER), letters = digits ? 0 : match(WORD);
  if (digits) {
    take("number", at + digits);
  } else if (letters) {
    const word = line.slice(at, at + letters);
    const isKeyword = language.words.has(language.ignoresCase ? word.toLowerCase() : word);
    const isTag = language === MARKUP && /[</]/.test(line[at - 1] ?? "");
    const isCall = !isKeyword && language !== DATA && line[at + letters] === "(";
    take(isKeyword || isTag ? "keyword" : isCall ? "name" : "", at + letters);
  } else {
    take("", at + String.fromCodePoint(line.codePointAt(at)).length);
  }
}
