// The chat page: one chat that is shown, and its parts.

import { byId, make } from "../dom.js";
import { ask } from "./ask.js";
import { ExchangeView, problemBox } from "./exchange_view.js";
import { Models } from "./models.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { browserStorage, ChatStore, newChat } from "./store.js";

const CURRENT = "minisgl.current";
const NEAR_END = 60;
// Where a model that does not chat is asked.
const PATHS = { embed: "/v1/embeddings", rerank: "/v1/rerank", classify: "/v1/classify" };
const EXAMPLE = "What is the weather in Paris?";

const turns = byId("turns"), question = byId("question");
const storage = browserStorage();
const store = new ChatStore(storage);
const settings = new Settings(storage, () => models.load());
const models = new Models(storage, () => settings.key, showModels);
const sidebar = new Sidebar(store, { open: openChat, remove: removeChat, refresh, say });
let chat = newChat(), running = null;

// Changes the page, and stays at its end if that was in view.
function grow(change) {
  const follows = turns.scrollHeight - turns.scrollTop - turns.clientHeight < NEAR_END;
  change();
  if (follows) turns.scrollTop = turns.scrollHeight;
}

// Screen readers announce it once.
function announce(text) {
  byId("announcer").textContent = text;
}

// Shows a line that goes away with the next change of the chat.
function say(text) {
  turns.append(make("p", { class: "faint" }, text));
  turns.scrollTop = turns.scrollHeight;
  announce(text);
  sidebar.show(chat.id);
}

function showModels(problem) {
  if (!byId("welcome")) return;
  showChat();
  if (problem) turns.append(problemBox(problem, () => settings.open()));
}

function welcome() {
  if (models.task !== "generate") {
    return make("div", { id: "welcome" },
      make("h2", {}, "This model does not chat"),
      make("p", {}, `It is served for the task “${models.task}”: send requests to ${PATHS[models.task] ?? "its API"}.`));
  }
  const example = make("button", {
    id: "example",
    type: "button",
    click: () => {
      byId("use-tools").checked = true;
      send(EXAMPLE);
    },
  }, EXAMPLE);
  const hint = models.capabilities.includes("tools") ? [make("p", {}, "or try tools:"), example] : [];
  return make("div", { id: "welcome" }, make("h2", {}, "Ask something"), ...hint);
}

function view(exchange) {
  return new ExchangeView(exchange, {
    retry: () => restart(exchange, exchange.question),
    edit: text => restart(exchange, text),
    openSettings: () => settings.open(),
  }, grow);
}

function showChat() {
  turns.replaceChildren(...(chat.exchanges.length ? [] : [welcome()]));
  for (const exchange of chat.exchanges) {
    const past = view(exchange);
    turns.append(past.node);
    past.showPast();
  }
  turns.scrollTop = turns.scrollHeight;
  sidebar.show(chat.id);
}

// Returns the messages of the exchanges that have an answer.
function messages(exchanges) {
  const answered = exchanges.filter(exchange => exchange.messages.length);
  return answered.flatMap(exchange => [{ role: "user", content: exchange.question }, ...exchange.messages]);
}

// Returns the fields of a request that the person has set.
function options() {
  const thinking = byId("thinking-control").hidden ? "" : byId("think").value;
  return { ...settings.parameters(), ...(thinking && { enable_thinking: thinking === "on" }) };
}

// Asks a question at the end of the chat.
async function send(text) {
  if (running) return;
  const run = running = new AbortController();
  // Another chat may be opened before the answer ends.
  const asked = chat, exchange = { question: text, messages: [], note: "", problem: null };
  const earlier = [...settings.opening(), ...messages(asked.exchanges)];
  asked.exchanges.push(exchange);
  keep(asked);
  byId("welcome")?.remove();
  const shown = view(exchange);
  turns.append(shown.node);
  turns.scrollTop = turns.scrollHeight;
  showRunning();
  announce("");
  if (!models.name) await models.load();
  await ask(exchange, {
    earlier, model: models.name, options: options(),
    useTools: byId("use-tools").checked && !byId("tools-control").hidden,
    key: settings.key, signal: run.signal, view: shown,
  });
  grow(() => shown.end());
  if (asked.exchanges.includes(exchange)) keep(asked);
  if (running !== run) return;
  running = null;
  showRunning();
  announce(exchange.problem ? `${exchange.problem.what} ${exchange.problem.advice}` : shown.innerText());
  // What a model can do is known once it has answered: it may have slept.
  if (!models.list[0]?.capabilities) models.load();
}

function keep(changed) {
  const kept = store.keep(changed);
  setCurrent(chat.id);
  refresh();
  if (!kept) say("This chat has no place in the browser's storage, and is lost when the page is closed.");
}

// Shows what is stored, also of the open chat. While that has an answer that runs, or a question that is edited, it stays
// as it is: it is kept as a chat of its own then.
function refresh() {
  const replacement = store.replacement(chat);
  if (!replacement || running || turns.querySelector(".edit")) return sidebar.show(chat.id);
  chat = replacement;
  showChat();
}

function showRunning() {
  byId("send").hidden = !(byId("stop").hidden = running === null);
}

// Asks a question again, or another one in its place. What follows is dropped.
function restart(exchange, text) {
  leave();
  chat.exchanges.length = chat.exchanges.indexOf(exchange);
  showChat();
  question.focus();
  send(text);
}

// Ends the answer that runs, before another one or another chat is shown.
function leave() {
  running?.abort();
  running = null;
  showRunning();
}

function setCurrent(id) {
  try {
    sessionStorage.setItem(CURRENT, id);
  } catch {
    // Without storage a reload begins a new chat.
  }
}

function openChat(id) {
  leave();
  chat = store.read(id) ?? newChat();
  setCurrent(chat.id);
  showChat();
  question.focus();
}

function removeChat(id) {
  store.remove(id);
  if (id !== chat.id) return sidebar.show(chat.id);
  // An answer that still runs does not bring it back.
  chat.exchanges.length = 0;
  openChat("");
}

byId("form").addEventListener("submit", event => {
  event.preventDefault();
  const text = question.value.trim();
  if (!text || running) return;
  question.value = "";
  send(text);
});
question.addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("form").requestSubmit();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("open-settings").addEventListener("click", () => settings.open());
byId("reset").addEventListener("click", () => openChat(""));
// Another tab has changed the chats.
window.addEventListener("storage", refresh);

function currentId() {
  try {
    return sessionStorage.getItem(CURRENT) ?? "";
  } catch {
    return "";
  }
}

function linkedQuestion() {
  const text = location.hash.slice(1);
  try {
    return decodeURIComponent(text);
  } catch {
    // Typed by hand, with a percent sign that encodes nothing.
    return text;
  }
}

// A link to /#question asks it at once, in a chat of its own.
const linked = linkedQuestion();
if (linked) history.replaceState(null, "", location.pathname + location.search);
else chat = store.read(currentId()) ?? chat;
showChat();
await models.load();
if (linked) send(linked);
