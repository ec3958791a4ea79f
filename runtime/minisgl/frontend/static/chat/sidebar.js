// The list of chats, with export and import; a drawer where the screen is narrow.

import { byId, download, make } from "../dom.js";
import { ImportError } from "./store.js";

const FILE = "minisgl-chats.json";

export class Sidebar {
  // `actions`: open(id), remove(id), refresh(), say(text).
  constructor(store, actions) {
    this.store = store;
    this.actions = actions;
    this.node = byId("chats");
    byId("open-chats").addEventListener("click", () => this.toggle(true));
    for (const id of ["close-chats", "shade"]) byId(id).addEventListener("click", () => this.toggle(false));
    document.addEventListener("keydown", event => {
      if (event.key === "Escape" && this.node.classList.contains("open")) this.toggle(false);
    });
    byId("export").addEventListener("click", () => download(FILE, "application/json", this.store.export()));
    byId("import").addEventListener("click", () => byId("import-file").click());
    byId("import-file").addEventListener("change", event => this.importFile(event.target));
  }

  toggle(open) {
    this.node.classList.toggle("open", open);
    byId("open-chats").setAttribute("aria-expanded", String(open));
    byId(open ? "close-chats" : "open-chats").focus();
  }

  show(currentId) {
    const chats = this.store.list();
    byId("no-chats").hidden = chats.length > 0;
    byId("export").disabled = chats.length === 0;
    byId("chat-list").replaceChildren(...chats.map(chat => make("li", {},
      make("button", {
        type: "button", class: "open", title: chat.title, "aria-current": chat.id === currentId ? "true" : null,
        click: () => {
          if (this.node.classList.contains("open")) this.toggle(false);
          this.actions.open(chat.id);
        },
      }, chat.title),
      this.deleteButton(chat))));
  }

  // The first click asks, the second one deletes.
  deleteButton({ id, title }) {
    const show = (text, label) => {
      button.textContent = text;
      button.setAttribute("aria-label", label);
    };
    const rest = () => show("×", `Delete ${title} (asks for confirmation)`);
    const button = make("button", {
      type: "button", class: "quiet", title: "Delete",
      click: () => {
        if (button.textContent === "Delete?") this.actions.remove(id);
        else show("Delete?", `Delete? Press again to delete ${title}`);
      },
      blur: rest,
    });
    rest();
    return button;
  }

  async importFile(input) {
    const [file] = input.files;
    input.value = "";
    if (!file) return;
    try {
      const count = this.store.import(await file.text());
      this.actions.refresh();
      this.actions.say(`${count} ${count === 1 ? "chat" : "chats"} imported`);
    } catch (error) {
      if (!(error instanceof ImportError)) throw error;
      this.actions.say(error.message);
    }
  }
}
