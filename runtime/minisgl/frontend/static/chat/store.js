// Chats in the browser's storage, one entry for each, so that several tabs do not overwrite each other's.
//
// A chat is { id, title, updated, exchanges }, `updated` in ms; an exchange { question, messages, note, problem }, with
// the messages of its answer as the API has them.

const PREFIX = "minisgl.chat.";
const FORMAT = "minisgl-chats";
const MAX_CHATS = 200;
const MAX_CHARACTERS = 3_000_000;
const MAX_TITLE = 60;

export class ImportError extends Error {}

export function newChat() {
  // Not randomUUID(), which pages of plain HTTP do not have.
  const id = [...crypto.getRandomValues(new Uint32Array(3))].map(number => number.toString(36)).join("");
  return { id, title: "", updated: Date.now(), exchanges: [] };
}

export class ChatStore {
  // `storage`: localStorage, or another object with its methods.
  constructor(storage) {
    this.storage = storage;
  }

  // Returns all chats, the latest first.
  list() {
    return this.ids().map(id => this.read(id)).filter(Boolean).sort((one, other) => other.updated - one.updated);
  }

  // Returns a chat; null if there is none, or it cannot be read.
  read(id) {
    try {
      return cleanChat(JSON.parse(this.storage.getItem(PREFIX + id)));
    } catch {
      return null;
    }
  }

  remove(id) {
    this.storage.removeItem(PREFIX + id);
  }

  // Writes a chat and returns whether it has a place. The oldest others are removed where all together would be too many
  // or too much; they stay if the chat has no place without them either.
  save(chat) {
    chat.title = (chat.exchanges[0]?.question ?? "").replace(/\s+/g, " ").slice(0, MAX_TITLE);
    const text = JSON.stringify(chat);
    if (text.length > MAX_CHARACTERS) return false;
    const others = this.list().filter(other => other.id !== chat.id);
    const texts = new Map(others.map(({ id }) => [id, this.storage.getItem(PREFIX + id)]));
    let size = text.length + [...texts.values()].reduce((sum, one) => sum + one.length, 0);
    const removed = [];
    for (;;) {
      if (others.length < MAX_CHATS && size <= MAX_CHARACTERS && this.put(chat.id, text)) return true;
      const oldest = others.pop();
      if (!oldest) break;
      size -= texts.get(oldest.id).length;
      this.remove(oldest.id);
      removed.push(oldest.id);
    }
    for (const id of removed) this.put(id, texts.get(id));
    return false;
  }

  // Writes a chat that was read or kept before, with the time of now. It gets another id where its entry has been
  // replaced meanwhile, so that neither is lost. Returns whether it has a place.
  keep(chat) {
    if (this.replacement(chat)) chat.id = newChat().id;
    const before = chat.updated;
    chat.updated = Date.now();
    const kept = this.save(chat);
    // That of its entry, if it has one.
    if (!kept) chat.updated = before;
    return kept;
  }

  // Returns the chat that another tab, an import or an earlier answer has put in the place of one that was read or kept;
  // null if none has.
  replacement(chat) {
    const stored = this.read(chat.id);
    return stored && stored.updated !== chat.updated ? stored : null;
  }

  put(id, text) {
    try {
      this.storage.setItem(PREFIX + id, text);
      return true;
    } catch {
      return false;
    }
  }

  ids() {
    const names = Array.from({ length: this.storage.length }, (_, index) => this.storage.key(index));
    return names.filter(name => name.startsWith(PREFIX)).map(name => name.slice(PREFIX.length));
  }

  // Returns the text of a file with all chats.
  export() {
    return JSON.stringify({ format: FORMAT, version: 1, chats: this.list() }, null, 2);
  }

  // Adds the chats of such a file, in place of those with the same id; returns how many. Raises ImportError.
  import(text) {
    let document;
    try {
      document = JSON.parse(text);
    } catch {
      throw new ImportError("This file is not JSON. Choose one that this page has exported.");
    }
    if (document?.format !== FORMAT || document.version !== 1 || !Array.isArray(document.chats)) {
      throw new ImportError("This file has no chats of this page. Choose one that this page has exported.");
    }
    const chats = document.chats.map(chat => {
      const clean = cleanChat(chat);
      if (!clean) throw new ImportError("A chat in this file is damaged. Nothing was imported.");
      return clean;
    });
    const placed = chats.sort((one, other) => one.updated - other.updated).filter(chat => this.save(chat));
    return placed.length;
  }
}

// Returns a chat with its known fields; null if one of them is not what it should be.
function cleanChat(chat) {
  if (!isText(chat?.id) || !/^[\w-]{1,40}$/.test(chat.id) || !Number.isFinite(chat.updated)) return null;
  if (!Array.isArray(chat.exchanges)) return null;
  const exchanges = chat.exchanges.map(cleanExchange);
  if (exchanges.includes(null)) return null;
  return { id: chat.id, title: isText(chat.title) ? chat.title : "", updated: chat.updated, exchanges };
}

function cleanExchange(exchange) {
  if (!isText(exchange?.question) || !Array.isArray(exchange.messages)) return null;
  const messages = exchange.messages.map(cleanMessage);
  if (messages.includes(null)) return null;
  const { what, advice, detail, action } = exchange.problem ?? {};
  const isProblem = isText(what) && isText(advice);
  const problem = isProblem ? { what, advice, detail: isText(detail) ? detail : "", action } : null;
  return { question: exchange.question, messages, note: isText(exchange.note) ? exchange.note : "", problem };
}

function cleanMessage(message) {
  if (!isText(message?.content)) return null;
  if (message.role === "tool") {
    const { role, tool_call_id, content } = message;
    return isText(tool_call_id) ? { role, tool_call_id, content } : null;
  }
  if (message.role !== "assistant") return null;
  const clean = { role: "assistant", content: message.content };
  if (isText(message.reasoning_content)) clean.reasoning_content = message.reasoning_content;
  if (message.tool_calls === undefined) return clean;
  if (!Array.isArray(message.tool_calls)) return null;
  const calls = message.tool_calls.map(cleanCall);
  return calls.includes(null) ? null : { ...clean, tool_calls: calls };
}

function cleanCall(call) {
  const { name, arguments: text } = call?.function ?? {};
  if (!isText(call?.id) || !isText(name) || !isText(text)) return null;
  return { id: call.id, type: "function", function: { name, arguments: text } };
}

const isText = value => typeof value === "string";

// Storage for a page that may not keep anything.
export class MemoryStorage {
  entries = new Map();

  get length() {
    return this.entries.size;
  }

  key(index) {
    return [...this.entries.keys()][index];
  }

  getItem(name) {
    return this.entries.get(name) ?? null;
  }

  setItem(name, value) {
    this.entries.set(name, String(value));
  }

  removeItem(name) {
    this.entries.delete(name);
  }
}

// Returns the browser's storage, or one that lasts as long as the page where that is switched off.
export function browserStorage() {
  try {
    localStorage.length;
    return localStorage;
  } catch {
    return new MemoryStorage();
  }
}
